"""What tests of models share."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

plain_trainer = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",  # lightning 2.6 with torch 2.14 and newer
    "ignore:The .* does not have many workers",
    "ignore:You defined a .validation_step. but have no .val_dataloader",
    "ignore:.weights_only. was not set",
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning",  # lightning 2.6 with jsonargparse 4.53
)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def samples(n=12, features=5, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=generator), torch.arange(n) % classes


def trainer(tmp_path, **kwargs) -> Trainer:
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(default_root_dir=tmp_path, accelerator="cpu", **(off | kwargs))


def checkpoint(tmp_path: Path, module: LightningModule) -> Path:
    """The path of what a plain Trainer saves of a module, without training it."""
    plain, path = trainer(tmp_path), tmp_path / "module.ckpt"
    plain.strategy.connect(module)
    plain.save_checkpoint(path, weights_only=True)
    return path


def in_channels_last(module):
    """Whether each convolution has the strides of channels-last, also those that have only one input channel."""
    weights = [part.weight for part in module.modules() if isinstance(part, nn.Conv2d)]
    assert weights
    sizes = [(weight.stride(), *weight.shape[1:]) for weight in weights]
    return all(strides == (c * h * w, 1, c * w, c) for strides, c, h, w in sizes)


class Adapted(nn.Linear):
    """A frozen layer with an adapter that is merged into its weights in eval mode, as loralib's are.

    LoRA, Hu et al., ICLR 2022 (https://arxiv.org/abs/2106.09685), section 4.1.
    """

    merges = True
    is_merged = False

    def __init__(self, features, outputs):
        super().__init__(features, outputs)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, features))
        self.up = nn.Parameter(torch.randn(outputs, 2))

    def train(self, mode=True):
        if self.merges and self.is_merged == mode:
            self.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) + (0 if self.is_merged else x @ self.down.T @ self.up.T)


class OnBase(LightningModule):
    """A frozen base with a trained head; ``change`` is called in each of its training steps."""

    change = staticmethod(lambda module, steps: None)
    steps = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 300).requires_grad_(False)
        self.head = nn.Linear(300, 3)
        self.double()

    def forward(self, x):
        return self.head(self.base(x))

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        self.change(self, self.steps)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)
