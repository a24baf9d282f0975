"""A sharded model and its optimizer, for torch.distributed.checkpoint.

torch calls `state_dict` to save, and both methods to load, in all processes.
"""

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict


class ShardedModel:
    """The weights of a model that `fully_shard` has sharded, by their names in it."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        """Return the weights, DTensors of which this process has its shards."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state):
        """Load such weights."""
        set_model_state_dict(self.model, state)


class ShardedOptimizer:
    """The state of such a model's optimizer, by the names of the parameters.

    Makes the state that an optimizer has only after its first step: torch loads into
    existing tensors, and a checkpoint may be due before any step was taken.
    """

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.state_dict()  # torch takes a step with zero gradients and learning rates
        for state in optimizer.state.values():
            state["step"].zero_()

    def state_dict(self):
        """Return the state, DTensors as well."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state):
        """Load such a state."""
        set_optimizer_state_dict(self.model, self.optimizer, state)
