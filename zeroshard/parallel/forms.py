"""The form of each parameter of a model: a plain tensor, or a DTensor of torch.

Owns the choice. It must not know engines. `core/parameter.py` has the plain form, `tensor.py` the other.
"""

from collections.abc import Mapping

from torch import nn

from zeroshard.core.parameter import PlainForm
from zeroshard.core.slot import Form
from zeroshard.wire.mesh import Mesh

__all__ = ["choose_forms"]


def choose_forms(model: nn.Module, mesh: Mesh, has_ignored: bool) -> Mapping[int, Form]:
    """Return the form (plain tensor or DTensor) of each parameter, by identity.

    Args:
        has_ignored: whether ignored parameters exist. Their gradients are local to a rank, so the gradients of the
            others must be logical at each stage.
    """
    if len(mesh.tensor_ranks) == 1:
        plain = PlainForm(has_axis=(has_ignored and mesh.world_size > 1) or mesh.pipe is not None)
        return dict.fromkeys(map(id, model.parameters()), plain)
    # torch's DTensor takes half a second to import.
    from zeroshard.parallel.tensor import forms_of

    return forms_of(model, mesh)
