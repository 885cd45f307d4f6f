"""Pictures of the representations that extractors compute (pFedMoE's t-SNE figures)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib import colormaps
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

from fedmoe_pl.callbacks.figures import MARKERS, log_figure, new_figure, styled
from fedmoe_pl.callbacks.sample_monitor import check_clients
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.evaluation.outputs import outputs_of, own_batch
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.logs.loggers import method_tag
from fedmoe_pl.models.inputs import inputs_of
from fedmoe_pl.models.mixtures.mixture import Architectures
from fedmoe_pl.models.mixtures.representation import RepresentationMoE
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_MOST_NAMED_CLASSES = 20  # whose colours are named


class RepresentationMonitor(FederationCallback):
    """Shows, at the end of a phase, the representations of some clients' samples by their own models.

    They are the outputs of the model's submodules called ``extractor``, each under the name of the expert that has it;
    of a ``RepresentationMoE`` those of the shared extractor, of the local one, and mixed by the gate. Where a gate
    sends each sample to one expert, all experts compute all samples. Loggers that take pictures get a t-SNE figure
    (scikit-learn), and TensorBoard's projector all of them with class and client of every sample. A client's samples
    are its held-out ones, or training samples if it has none. Warnings name phases whose model has no extractor, and
    representations that cannot be shown.

    Args:
        clients: ids of the clients that are shown; None for 0, 1 and 2, or as many as there are.
        samples_per_client: the largest number of samples of each client; its first ones are shown.

    Raises:
        MisconfigurationException: if ``samples_per_client`` is below 1, or an id is no client's.
    """

    needs_clients = True

    def __init__(self, clients: list[int] | None = None, samples_per_client: int = 100) -> None:
        self.clients = [0, 1, 2] if clients is None else clients
        self._are_chosen = clients is not None
        check_at_least(self, "samples_per_client", samples_per_client, 1)
        self.samples_per_client = samples_per_client

    def on_fit_start(self, run: Run) -> None:
        """Refuses ids that no client has, and says what cannot be shown."""
        if not self._are_chosen:
            self.clients = [*range(min(3, run.datamodule.num_clients))]
        check_clients(self, self.clients, run.datamodule)
        if not run.loggers.take_images:
            rank_zero_warn("RepresentationMonitor: nothing is shown, because no logger takes pictures.")
        for phase in run.phases:
            module = run.module(phase)
            if phase.evaluate and not isinstance(module, RepresentationMoE) and not _extractors(module):
                name = type(module).__name__
                rank_zero_warn(f"RepresentationMonitor: {phase} is not shown, because its {name} has no extractor.")

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Computes and shows the representations."""
        if evaluation is None or not run.loggers.take_images:
            return
        representations, classes, owners = self.compute(run, phase.name)
        if not representations:
            return
        points = {name: embed(values, run.seed) for name, values in representations.items()}
        draw = partial(representation_figure, phase.name, points, classes.numpy(), owners.numpy())
        log_figure(run, "representations", draw, evaluation.step, evaluation.method)
        metadata: list[Any] = [list(row) for row in zip(classes.tolist(), owners.tolist(), strict=True)]
        for writer in run.loggers.writers(evaluation.method):
            for name, values in representations.items():
                writer.add_embedding(
                    values,
                    metadata=metadata,
                    metadata_header=["class", "client"],
                    global_step=evaluation.step,
                    tag=method_tag(name),
                )

    def compute(self, run: Run, method: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The representations that can be shown, each (n, F), by name, and the samples' classes and clients, (n,)."""
        datamodule = run.datamodule
        of_clients: list[dict[str, Tensor]] = []
        classes, owners, has_extractor = [], [], False  # a model without one has been named before the run
        for client, module in zip(self.clients, run.client_modules(method, self.clients), strict=True):
            samples, batch = own_batch(datamodule, client, self.samples_per_client)
            has_extractor = has_extractor or bool(_extractors(module))
            of_clients.append(representations_of(module, batch, len(samples), datamodule.has_pairs))
            no_classes = torch.zeros(len(samples), dtype=torch.int64)
            classes.append(datamodule.y[samples].cpu() if datamodule.num_classes else no_classes)
            owners.append(torch.full_like(no_classes, client))
        if has_extractor and not any(of_clients):
            rank_zero_warn(
                f"RepresentationMonitor: Phase '{method}' is not shown, because no extractor of its model gave a "
                "tensor with a row for each sample."
            )
        return _joined(method, of_clients), torch.cat(classes), torch.cat(owners)


def _joined(method: str, of_clients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined = {}
    for name in dict.fromkeys(name for of_client in of_clients for name in of_client):
        parts = [of_client[name] for of_client in of_clients if name in of_client]
        is_complete = len(parts) == len(of_clients) and len({part.shape[1] for part in parts}) == 1
        if is_complete and sum(map(len, parts)) >= 3 and all(part.isfinite().all() for part in parts):
            joined[name] = torch.cat(parts)
        else:
            rank_zero_warn(
                f"RepresentationMonitor: Phase '{method}': {name} representations are not shown, because they must be "
                "finite, of the same size for all of the clients, and of at least three samples."
            )
    return joined


def representations_of(module: LightningModule, batch: Any, size: int, is_pair: bool = True) -> dict[str, Tensor]:
    """The representations (B, F) that a module computes for a batch, by the name of their expert."""
    with torch.inference_mode():
        if isinstance(module, RepresentationMoE):
            x = move_data_to_device(inputs_of(batch, module.target_key), torch.device("cpu"))
            return module.representations(x)._asdict()
        outputs: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            hooks.enter_context(dense_experts())  # otherwise each computes a part of the samples
            for name, extractor in _extractors(module).items():
                hooks.enter_context(extractor.register_forward_hook(partial(_note, outputs, name)))
            outputs_of(module, batch, is_pair)
    return {name: output.flatten(1) for name, output in outputs.items() if len(output) == size}


def _extractors(module: nn.Module) -> Mapping[str, nn.Module]:
    """The submodules called ``extractor``, by the name of the part that has them."""
    modules, extractors = dict(module.named_modules()), dict[str, nn.Module]()
    for path, part in modules.items():
        owner, _, name = path.rpartition(".")
        if name == "extractor":
            parent = owner.rpartition(".")[0]  # of architectures, whose experts have the same name in all clients
            owner = parent if isinstance(modules[parent], Architectures) else owner
            extractors.setdefault(re.sub("[._]", " ", owner) or "extractor", part)
    return extractors


def _note(outputs: dict[str, Tensor], name: str, extractor: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.dim() > 1:
        outputs[name] = output


def embed(representations: Tensor, seed: int) -> np.ndarray:
    """Points (n, 2) of t-SNE for representations (n, F), n at least 3; the same in every call."""
    from sklearn.manifold import TSNE  # slow to import, and only needed here
    from threadpoolctl import threadpool_limits

    neighbours = min(30.0, (len(representations) - 1) / 3)
    tsne = TSNE(perplexity=neighbours, init="random", random_state=seed % 2**32)
    with threadpool_limits(1):  # several wait for each other at every step where another process holds a core
        return tsne.fit_transform(representations.double().numpy())


@styled
def representation_figure(
    method: str, points: Mapping[str, np.ndarray], classes: np.ndarray, clients: np.ndarray
) -> Figure:
    """Representations as points in the plane: a panel for each kind, colours for classes, markers for clients."""
    figure = new_figure(height=0.6 + 1.9 * len(points))
    panels = figure.subplots(len(points), 1, squeeze=False)[:, 0]
    colormap = colormaps["tab10" if classes.max() < 10 else "nipy_spectral"]
    colors = colormap(classes if classes.max() < 10 else classes / classes.max())
    for axes, (name, places) in zip(panels, points.items(), strict=True):
        for client, marker in zip(np.unique(clients), cycle(MARKERS), strict=False):
            of_client = clients == client
            look = {"marker": marker, "s": 8, "lw": 0, "label": f"client {client}"}
            axes.scatter(*places[of_client].T, c=colors[of_client], **look)
        axes.set(title=f"{method}: {name} representations, t-SNE", xticks=[], yticks=[])
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=3)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_color("black")  # a client's samples have the colours of their classes
    shown, first = np.unique(classes, return_index=True)
    if 1 < len(shown) <= _MOST_NAMED_CLASSES:
        of_classes = [
            Patch(color=tuple(colors[place]), label=str(label)) for label, place in zip(shown, first, strict=True)
        ]
        figure.legend(handles=of_classes, title="class", loc="outside right center")
    return figure
