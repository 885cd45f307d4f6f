"""Models of several clients, stacked so that one call computes the outputs of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.conv import _ConvNd

from fedmoe_pl.backends import LocalTraining
from fedmoe_pl.backends.stacked.trial import CPU_CACHE
from fedmoe_pl.data import EVALUATED_AT_ONCE, FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.evaluation.outputs import ScoresAndWeights, load_to_evaluate
from fedmoe_pl.models.layers import treats_samples_apart
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.trees import Tree, loads_by_itself, names_of_same_tensors

_MOST = 8  # models in a stack; more gain little and would leave worker processes without work


def evaluation_groups(training: LocalTraining, clients: Sequence[int]) -> list[list[int]]:
    """Divides clients into groups whose models are stacked: of one architecture and similar numbers of samples.

    A client is alone if its model is large, has a convolution, holds a tensor under several names (which
    ``functional_call`` does not restore), loads its state by its own code, or has layers that are not known to treat
    samples apart, such as a user's. Convolutions gain nothing from stacking on a CPU; on a GPU, where this was not
    measured, a batch of one model is already large.
    """
    sizes, groups = training.datamodule.train_samples.sizes.tolist(), []
    if training.datamodule.reader is not None:  # reading samples one by one takes longer than stacking saves
        return [[client] for client in clients]
    for members in training.by_architecture(clients):
        module = training.of(members[0]).module
        is_alone = any(isinstance(part, _ConvNd) for part in module.modules())
        is_alone = is_alone or bool(names_of_same_tensors(module)) or loads_by_itself(module)
        is_alone = is_alone or not treats_samples_apart(module)
        model_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
        most = 1 if is_alone else max(min(_MOST, CPU_CACHE // max(model_bytes, 1)), 1)
        ordered = sorted(members, key=lambda client: (-sizes[client], client))
        size = -(-len(ordered) // -(-len(ordered) // most))
        groups += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return groups


class StackedModels:
    """The models of k clients of one architecture; tensors that are the same object in all of them are not stacked."""

    def __init__(self, module: LightningModule, states: Sequence[Tree]) -> None:
        first = states[0]
        differ = [name for name in first if any(state[name] is not first[name] for state in states)]
        load_to_evaluate(module, first)
        self.module = ScoresAndWeights(module)
        self.stacked = {
            f"module.{name}": torch.stack([state[name] for state in states]).to(module.device)
            for name in differ or [*first][:1]  # `vmap` needs at least one tensor to map over
        }
        self.device = module.device

    def work(self, datamodule: FederatedDataModule) -> bool:
        """Whether ``vmap`` can map over the models."""
        ((x, _),) = datamodule.batches(datamodule.global_test[:1], batch_size=1)
        try:
            self._call(x, None)
        except Exception:
            return False
        return True

    def outputs(self, datamodule: FederatedDataModule, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of each model for the same samples, (k, n, ...), and the targets (n, ...)."""
        batches = datamodule.batches(samples, batch_size=EVALUATED_AT_ONCE)
        outputs, targets = zip(*((self._call(x, None)[0], y.cpu()) for x, y in batches), strict=True)
        return torch.cat(outputs, 1), torch.cat(targets)

    def of_each(
        self, datamodule: FederatedDataModule, parts: ClientSamples
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """For each model and its own part: scores (n, ...), weights (n, experts) or None, and targets (n, ...)."""
        if not len(parts.indices):
            return
        padded = nn.utils.rnn.pad_sequence([*parts], batch_first=True)  # (k, longest), padded with sample 0
        pieces = [self._of_piece(datamodule, samples) for samples in padded.split(EVALUATED_AT_ONCE // _MOST, dim=1)]
        outputs = [torch.cat(output, 1) for output in zip(*pieces, strict=True)]
        for row, samples in enumerate(parts):
            targets, scores, *weights = (output[row, : len(samples)] for output in outputs)
            yield scores, weights[0] if weights else None, targets

    def _of_piece(self, datamodule: FederatedDataModule, samples: Tensor) -> tuple[Tensor, ...]:
        """Targets (k, b, ...), scores (k, b, C), and weights if there is a trained gate, for samples (k, b)."""
        ((x, y),) = datamodule.batches(samples.flatten(), batch_size=samples.numel())
        return y.cpu().unflatten(0, samples.shape), *self._call(x.unflatten(0, samples.shape), 0)

    @torch.inference_mode()
    def _call(self, x: Tensor, dim: int | None) -> tuple[Tensor, ...]:
        def outputs(tensors: Tree, x: Tensor) -> tuple[Tensor, ...]:
            return functional_call(self.module, tensors, (x,), tie_weights=False)

        with dense_experts():
            return tuple(output.cpu() for output in vmap(outputs, (0, dim))(self.stacked, x.to(self.device)))
