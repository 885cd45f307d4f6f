"""PFL-MoE: Guo, Mei, Xiao, Wu, APWeb-WAIM 2021, Algorithms 1 and 2 (https://arxiv.org/abs/2012.15589).

Both stages follow a federated phase and run once, on each client separately. Where the paper and the official code
differ, the configurations in ``configs`` follow the code, except in Local and in frozen dropout, with these arguments:

==================  =======================  ===========================  ==========================================
topic               paper                    official code                here
==================  =======================  ===========================  ==========================================
gate data           "divide"                 1/4 gate, 3/4 expert         ``gate_fraction=0.25``
gate optimizer      SGD, 0.001               Adam, 0.001, decay 5e-4      ``optimizer`` of the gate's phase
schedule            expert, gate in turn     expert first, then gate      ``interleaved``; ``gate_lr`` of the model
FedAvg weights      uniform                  uniform                      ``FedAvg(weighting="uniform")``
augmentation        not mentioned            crop and flip, always        ``augmentation`` of the data
Local               300 epochs, SGD or Adam  Adam, README: 100 epochs     two phases; the better row counts
gate's input        samples or features      flags swapped in README      ``LinearGate`` is MF, ``FeatureGate`` is MFE
frozen dropout      not mentioned            active                       ``frozen_train_mode``
FedAvg's round      best on the test set     best on the test set         ``select.monitor: global_test`` of FedAvg
PFL-FB's data       not mentioned            3/4                          ``gate_fraction`` of ``FineTuning``
==================  =======================  ===========================  ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import (
    copy_of_global_expert,
    counted,
    evaluation_copy,
    expert_loss,
    note_references,
    pairs_of,
    set_aside,
    trains,
)
from fedmoe_pl.checks import check_number
from fedmoe_pl.data import SampleBatches
from fedmoe_pl.trees import Tree, load_tree

_GATE = 1  # separates the gate's share of a client's samples from other shares of them


class FineTuning(Algorithm):
    """PFL-FT, PFL-FB: the local expert starts as a copy of the global one and is fine-tuned, in whole or in part.

    Args:
        trainable: glob patterns of the parameters that are trained: ``local_expert.*`` is PFL-FT,
            ``local_expert.classifier.*`` is PFL-FB.
        gate_fraction: share of the client's samples, below 1, that is set aside for the gate; 0 trains on all of them.
        frozen_train_mode: whether frozen modules stay in train mode.
        keep_better: whether a client whose fine-tuned expert has no lower loss on its validation samples than the
            global one takes the global one in its place, after every round (Wang et al. 2019,
            https://arxiv.org/abs/1910.10252).
    """

    federated = False
    parts = Parts(needed=("global_expert",), copied={"local_expert": "global_expert"})  # Algorithm 1, line 2
    needs = ("loss_of_outputs",)
    samples_in_loss_only = True

    def __init__(
        self,
        trainable: str | list[str] = "local_expert.*",
        gate_fraction: float = 0.0,
        frozen_train_mode: bool = False,
        keep_better: bool = False,
    ) -> None:
        check_number(self, "gate_fraction", gate_fraction, least=0, below=1)
        super().__init__(trainable=trainable)
        self.gate_fraction = gate_fraction
        self.frozen_train_mode = frozen_train_mode
        self.keep_better = keep_better
        self.samples_in_loss_only = not keep_better
        if keep_better:
            self.needs += ("validation_samples",)

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Cross-entropy of the local expert only, whatever the gate (Algorithm 2, line 7)."""
        return expert_loss(module, "local_expert", batch)

    def client_samples(self, client: Client) -> Tensor:
        """The samples that are not set aside for the gate."""
        return set_aside(client, self.gate_fraction, _GATE)[1] if self.gate_fraction else client.samples

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Keeps the fine-tuned expert or, if ``keep_better`` finds it no better, another copy of the global one.

        It also notes the samples with which a ``SimilarityGate`` compares others (FedDPA-F).
        """
        if self.keep_better and len(samples := client.datamodule.validation_samples[client.id]):
            batches = client.batches(samples)
            if not _mean_loss(client, "local_expert", batches) < _mean_loss(client, "global_expert", batches):
                load_tree(client.module, copy_of_global_expert(client.module))
        note_references(client)
        return super().client_final(client, constants)


class PFLMoE(Algorithm):
    """PFL-MF with a ``LinearGate``, PFL-MFE with a ``FeatureGate``: the gate learns to weigh the frozen experts.

    It starts from a ``FineTuning`` phase with the same ``gate_fraction``. Every client draws a new gate.

    Args:
        gate_fraction: share of the client's samples that trains the gate; the samples are split as in
            ``FineTuning``. 0 trains the gate on all samples, which the local expert has then seen, too. A
            local expert that another phase than ``FineTuning`` made, such as ``start: {global_expert: FedAvg,
            local_expert: Ditto}``, has seen all samples, so that ``gate_fraction`` must be 0.
        interleaved: whether to use the paper's schedule in place of the code's. The phase then starts from the
            federated phase. Even rounds train the local expert on its samples, odd rounds the gate on the others. Use
            ``train: {max_epochs: 1}`` and as many ``rounds`` as expert and gate have epochs. Every round has a new
            optimizer, which makes no difference to the paper's plain SGD; momentum needs the phase's
            ``train.keep_optimizer``. The gate's learning rate may be another one: ``gate_lr`` of ``PersonalizedMoE``.
        trainable: glob patterns of the local expert's parameters that are trained if ``interleaved``.
        frozen_train_mode: whether frozen modules stay in train mode.
    """

    federated = False
    samples_in_loss_only = True

    def __init__(
        self,
        gate_fraction: float = 0.25,
        interleaved: bool = False,
        trainable: str | list[str] = "local_expert.classifier.*",
        frozen_train_mode: bool = False,
    ) -> None:
        never_0 = interleaved  # each round trains on one of both shares
        check_number(
            self, "gate_fraction", gate_fraction, least=None if never_0 else 0, above=0 if never_0 else None, below=1
        )
        super().__init__(trainable=trainable if interleaved else "*")
        self.gate_fraction = gate_fraction
        self.interleaved = interleaved
        self.samples_in_loss_only = not interleaved
        self.needs = ("loss_of_outputs",) if interleaved else ()
        self.parts = replace(FineTuning.parts if interleaved else Parts(needed=("local_expert",)), new_gate=True)
        self.frozen_train_mode = frozen_train_mode

    def missing_start(self, earlier: Sequence[Algorithm], part: str = "") -> str:
        """Experts that have not seen the gate's samples, any if it has none; a federated model if interleaved."""
        if self.interleaved:
            return super().missing_start(earlier)
        if part and not self.gate_fraction:
            return missing_local_expert(earlier)
        missing = missing_expert(earlier, self.gate_fraction)
        return f"{missing} (gate_fraction 0 takes any local expert)" if missing and part else missing

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The gate; in even rounds of the interleaved schedule, the local expert."""
        return name in self.trainable if self._trains_expert(round) else name.startswith("gate.")

    def client_samples(self, client: Client) -> Tensor:
        """The gate's samples, or the expert's in rounds that train the expert."""
        if not self.gate_fraction:
            return client.samples
        gate_samples, expert_samples = set_aside(client, self.gate_fraction, _GATE)
        return expert_samples if self._trains_expert(client.round) else gate_samples

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors, and tells the loss whether the round trains the expert."""
        super().client_init(client, sent)
        return {"trains_expert": self._trains_expert(client.round)}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Cross-entropy of the mixture; in rounds that train the expert, of the expert only (Algorithm 2, line 7)."""
        if not constants["trains_expert"]:
            return super().client_loss(module, batch, constants)
        return expert_loss(module, "local_expert", batch)

    def _trains_expert(self, round: int) -> bool:
        return self.interleaved and round % 2 == 0


def missing_expert(earlier: Sequence[Algorithm], gate_fraction: float) -> str:
    """The experts that a mixture needs, unless the last ones before it are such: not trained on the gate's samples."""
    needed = f"a phase of FineTuning with gate_fraction {gate_fraction:g}"
    for other in earlier:
        if isinstance(other, FineTuning) or (isinstance(other, PFLMoE) and other.interleaved and len(earlier) > 1):
            return "" if other.gate_fraction == gate_fraction else needed
        if gate_fraction and trains(other, "local_expert."):
            return needed  # on the gate's samples, too
    return needed


def missing_local_expert(earlier: Sequence[Algorithm]) -> str:
    """Words for ``Algorithm.missing_start`` of a mixture that takes any trained local expert; empty if there is one."""
    return "" if any(trains(other, "local_expert.") for other in earlier) else "a phase that trains the local expert"


@torch.no_grad()
def _mean_loss(client: Client, expert: str, batches: SampleBatches) -> float:
    """Mean loss of one of the client's experts in eval mode, computed on the data's device."""
    module = evaluation_copy(client, batches)
    total = number = 0
    for x, y in pairs_of(module, batches):
        if size := counted(module, y):  # the mean over nothing is nan
            total, number = total + expert_loss(module, expert, (x, y)).item() * size, number + size
    return total / number if number else 0.0
