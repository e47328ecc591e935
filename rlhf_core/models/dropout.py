"""Dropout off in training as well, for RL: old and new log-probs have to come from one and the same function."""

from torch import nn


def turn_dropout_off(model: nn.Module) -> None:
    """Every probability is 0 afterwards; the model's configuration, which its export carries, stays as it is.

    Attention modules keep theirs as a float named after dropout (Llama's attention_dropout, OPT's dropout), as decoders
    do that leave out whole layers (OPT's layerdrop); other modules are torch's own.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
