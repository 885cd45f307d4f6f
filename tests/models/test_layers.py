"""What a trial of a module leaves behind."""

import torch
from torch import nn

from fedmoe_pl.models.layers import trying


class Counting(nn.Module):
    """Has a buffer whose elements share memory, and another name of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1).expand(6), persistent=False)
        self.same = self.calls

    def forward(self, x):
        self.calls += 1
        self.scale = self.scale * 2
        self.register_buffer("last", x)
        return self.scale * torch.rand(6)


def test_buffers_and_random_numbers_are_as_they_were_before():
    module = Counting()
    buffers, versions = dict(module.named_buffers()), [buffer._version for buffer in module.buffers()]
    state = torch.get_rng_state()
    with trying(module):
        module(torch.ones(2))
        assert module.calls == 1 and module.scale[0] == 2
    assert dict(module.named_buffers()).keys() == buffers.keys()
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
    assert [buffer._version for buffer in module.buffers()] == versions and module.same == 0
    assert torch.equal(torch.get_rng_state(), state)
