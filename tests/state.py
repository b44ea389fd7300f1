"""Every tensor that a model carries besides its parameters: buffers, and what its routers have gathered in the step so far."""

from torch import Tensor, nn

from evenload.balancers.balancer import StatefulModule


def carried(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_buffers())
    for path, module in model.named_modules():
        if isinstance(module, StatefulModule):
            tensors |= {f"{path}.{name}": value for name, value in module.statistics().items()}
    return tensors
