"""The whole state of a sharded model and its optimizer, for a one-file checkpoint."""

from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from common.args import fail

# Whole tensors, in the CPU memory of rank 0; the other ranks get an empty dict.
OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FullModel:
    """The weights of a model that `fully_shard` has sharded, as those of a plain one.

    All ranks have to call both methods, since each has a shard of every weight.
    """

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        """Return the weights on rank 0, and an empty dict on the others."""
        return get_model_state_dict(self.model, options=OPTIONS)

    def load_state_dict(self, state):
        """Load weights, of which every rank passes all and keeps its shards."""
        set_model_state_dict(self.model, state, options=OPTIONS)


class FullOptimizer:
    """The state of the optimizer of such a model; all ranks have to call its methods.

    It names the parameters as the model does, and not by numbers.
    """

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        """Return the state on rank 0, and an empty dict on the others."""
        return get_optimizer_state_dict(self.model, self.optimizer, options=OPTIONS)

    def load_state_dict(self, state):
        """Load a state, of which every rank passes all and keeps its shards.

        Ends with one line and exit code 2 if it names parameters as a plain optimizer
        does, by numbers.
        """
        names = {name for group in state["param_groups"] for name in group["params"]}
        if names != dict(self.model.named_parameters()).keys():
            fail(
                "--checkpoint-dir: these checkpoints are of a model that was not"
                " sharded; name another directory"
            )
        set_optimizer_state_dict(self.model, self.optimizer, state, options=OPTIONS)
        if not state["state"]:  # all steps were skipped, and torch has counted one
            self.optimizer.state.clear()
