"""What trainers of other libraries share: copies of a state in host memory."""

import torch

from zeroshard.integrations.parts import _copied


def test_copies_share_memory_as_the_tensors_did_and_keep_their_shapes() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    state = {"matrix": matrix, "tied": matrix, "row": matrix[0], "turned": matrix.t(), "empty": matrix[:0], "step": 3}
    found = _copied(dict(state))
    assert found.keys() == state.keys() and found["step"] == 3
    assert all(torch.equal(found[name], one) for name, one in state.items() if isinstance(one, torch.Tensor))
    assert found["tied"] is found["matrix"] and found["matrix"].data_ptr() != matrix.data_ptr()
