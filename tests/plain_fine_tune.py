"""Fine-tune in one process, without FSDP: what tests hold fine_tune.py against."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from fine_tune import collate
from fine_tune import count_labels
from fine_tune import get_loss_sum
from fine_tune import make_dataset
from fine_tune import make_parser


def main():
    args, device = make_parser().parse_args(), torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    in_parts = functools.partial(collate, micro_batches=args.micro_batches)
    options = {"batch_size": args.batch_size, "drop_last": True, "shuffle": True}
    train_loader = DataLoader(make_dataset(505, 1), collate_fn=in_parts, **options)
    ((inputs, labels),) = collate(make_dataset(97, 2))
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in train_loader:
            tokens = count_labels(batch).to(device)
            optimizer.zero_grad()
            for each in batch:
                (get_loss_sum(args, model, *each, device) / tokens).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
        with torch.no_grad():
            loss = get_loss_sum(args, model.eval(), inputs, labels, device)
        loss = loss / count_labels([(inputs, labels)])
        print(f"epoch {epoch}: loss {loss:.4f}, norm of the last gradient {norm:.4f}")
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
