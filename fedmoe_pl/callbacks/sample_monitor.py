"""Pictures of single samples beside the weights that a client's gate gives to its experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from fedmoe_pl.callbacks.figures import COLORS, INK, log_figure, new_figure, styled
from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.measure import predict
from fedmoe_pl.evaluation.metrics import predicts_classes
from fedmoe_pl.evaluation.outputs import has_trained_gate, own_batch
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.models.inputs import first_tensor, inputs_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


def check_clients(owner: object, clients: Sequence[int], datamodule: FederatedDataModule) -> None:
    """Refuses ids that no client has."""
    ids = range(datamodule.num_clients)
    if not clients or not {*clients} <= {*ids}:
        raise InvalidArgumentError(owner, "clients", clients, f"ids of clients, from 0 to {len(ids) - 1}")


def words_of(datamodule: FederatedDataModule, ids: Tensor) -> list[list[str]] | None:
    """The words of texts, if samples (n, T) are ids of words in the data's vocabulary."""
    if not datamodule.vocabulary or ids.dim() != 2 or ids.is_floating_point():
        return None
    words = ["", "?", *datamodule.vocabulary]
    return [[words[token] if token < len(words) else "?" for token in row] for row in ids.tolist()]


_BINS = 10  # of certainty
_COLUMNS = 4  # images beside each other
_WORDS = 12  # of a text


class GatedSamples(NamedTuple):
    """Samples of one client: what was fed to its mixture, and what came out.

    Attributes:
        x: the samples, shape (n, ...).
        classes: their classes, shape (n,).
        predicted: the classes that the mixture predicts, shape (n,).
        weights: the gate's weights, shape (n, experts).
    """

    x: Tensor
    classes: Tensor
    predicted: Tensor
    weights: Tensor

    @property
    def certainty(self) -> Tensor:
        """The largest weight of each sample, shape (n,)."""
        return self.weights.amax(1)

    def take(self, samples: Tensor) -> GatedSamples:
        """Some of the samples, by their places."""
        return GatedSamples(*(values[samples] for values in self))


class SampleMonitor(FederationCallback):
    """Shows, at the end of a phase with a trained gate, what the gate does with single samples; for classification.

    Loggers that take pictures get, for each of some clients, the samples on which its gate is most and least certain
    (those with the highest and the lowest largest weight), with the weights, the class and the prediction. Samples are
    shown if they are images, or texts with a vocabulary. Over all samples of these clients, loggers get a curve of how
    often the mixture is right by how certain the gate is. Samples are held-out ones, or training samples of a client
    that has none.

    Args:
        clients: ids of the clients that are shown; None for 0, 1 and 2, or as many as there are.
        samples: number of most certain samples, and of least certain ones, of each client.

    Raises:
        MisconfigurationException: if ``samples`` is below 1, or an id is no client's.
    """

    needs_clients = True

    def __init__(self, clients: list[int] | None = None, samples: int = 4) -> None:
        check_at_least(self, "samples", samples, 1)
        self.clients = [0, 1, 2] if clients is None else clients
        self._are_chosen = clients is not None
        self.samples = samples

    def on_fit_start(self, run: Run) -> None:
        """Refuses ids that no client has, and says if nothing can be shown."""
        if not self._are_chosen:
            self.clients = [*range(min(3, run.datamodule.num_clients))]
        check_clients(self, self.clients, run.datamodule)
        is_shown = any(predicts_classes(model, run.datamodule) for model in run.models.values())
        if not (run.loggers.take_images and is_shown):
            why = "no model predicts classes" if run.loggers.take_images else "no logger takes pictures"
            rank_zero_warn(f"SampleMonitor: nothing is shown, because {why}.")

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the samples of each client, and the curve over all of them."""
        if evaluation is None or not run.loggers.take_images:
            return
        module = run.module(phase)
        if not (has_trained_gate(module) and predicts_classes(module, run.datamodule)):
            return
        of_clients = self.compute(run, phase.name)
        for client, gated in of_clients.items():
            order = gated.certainty.argsort(stable=True)
            number = min(self.samples, len(order) // 2)
            panels = {"least certain": gated.take(order[:number]), "most certain": gated.take(order.flip(0)[:number])}
            texts = {name: words_of(run.datamodule, part.x) for name, part in panels.items()}
            title = f"{evaluation.method}: samples of client {run.datamodule.client_names[client]}"
            names = run.datamodule.classes, module.has_global_expert
            if number and gated.x.dim() == 4 and gated.x.shape[1] in (1, 3):
                draw = partial(image_samples_figure, panels, title, *names)
            elif number and None not in texts.values():
                draw = partial(text_samples_figure, panels, texts, title, *names)
            else:
                continue
            tag = f"samples/{run.datamodule.client_names.file(client)}"
            log_figure(run, tag, draw, evaluation.step, evaluation.method)
        certainty = torch.cat([gated.certainty for gated in of_clients.values()]).numpy()
        right = torch.cat([gated.predicted == gated.classes for gated in of_clients.values()]).numpy()
        draw = partial(certainty_figure, certainty, right, f"{evaluation.method}: {len(of_clients)} clients")
        log_figure(run, "samples/right_by_certainty", draw, evaluation.step, evaluation.method)

    def compute(self, run: Run, method: str) -> dict[int, GatedSamples]:
        """What the clients' mixtures say of their own samples, on the CPU."""
        datamodule, found = run.datamodule, dict[int, GatedSamples]()
        for client, module in zip(self.clients, run.client_modules(method, self.clients), strict=True):
            samples, batch = own_batch(datamodule, client)
            scores, weights, _ = predict(module, datamodule, samples)
            assert weights is not None and has_trained_gate(module)
            x = first_tensor(inputs_of(batch, module.target_key))
            outputs = (x, datamodule.y[samples], scores.argmax(1), weights.double())
            found[client] = GatedSamples(*(values.cpu() for values in outputs))
        return found


@styled
def image_samples_figure(
    panels: dict[str, GatedSamples], title: str, classes: Sequence[str] | None = None, has_global_expert: bool = True
) -> Figure:
    """Images, with the weights of the experts as a bar below each; the title of one that is wrong is coloured."""
    places = {name: torch.arange(len(gated.x)).split(_COLUMNS) for name, gated in panels.items()}
    rows = [(name, gated.take(some)) for name, gated in panels.items() for some in places[name]]
    figure = new_figure(0.4 + 1.25 * len(rows))
    figure.suptitle(title)
    grid = figure.add_gridspec(2 * len(rows), _COLUMNS, height_ratios=[8, 1] * len(rows))
    for row, (name, gated) in enumerate(rows):
        for column in range(len(gated.x)):
            axes = figure.add_subplot(grid[2 * row, column])
            image = gated.x[column].permute(1, 2, 0).float().numpy()
            low, high = image.min(), image.max()
            axes.imshow((image - low) / max(high - low, 1e-12), cmap="gray")
            axes.set(xticks=[], yticks=[], ylabel=name if column == 0 else None)
            given, predicted = _classes_of(gated, column, classes)
            is_right = bool(gated.classes[column] == gated.predicted[column])
            shown = given if is_right else f"{given}, not {predicted}"
            axes.set_title(shown, color=INK if is_right else COLORS[3])
            _draw_weights(figure.add_subplot(grid[2 * row + 1, column]), gated.weights[column])
    _name_experts(figure, rows[0][1].weights.shape[1], has_global_expert)
    return figure


@styled
def text_samples_figure(
    panels: dict[str, GatedSamples],
    texts: dict[str, Any],
    title: str,
    classes: Sequence[str] | None = None,
    has_global_expert: bool = True,
) -> Figure:
    """The first words of texts, with the weights of the experts as a bar below each."""
    rows = [(name, gated, place) for name, gated in panels.items() for place in range(len(gated.x))]
    figure = new_figure(0.4 + 0.55 * len(rows))
    figure.suptitle(title)
    for axes, (name, gated, place) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        words = [word for word in texts[name][place] if word]
        axes.set_title(" ".join(words[:_WORDS]) + (" ..." if len(words) > _WORDS else ""), loc="left")
        given, predicted = _classes_of(gated, place, classes)
        said = f"; {name}; class {given}, predicted {predicted}"
        _draw_weights(axes, gated.weights[place], said)
    _name_experts(figure, rows[0][1].weights.shape[1], has_global_expert)
    return figure


@styled
def certainty_figure(certainty: np.ndarray, right: np.ndarray, title: str) -> Figure:
    """The share of right predictions by the gate's largest weight, above the number of samples in each bin."""
    edges = np.linspace(certainty.min(), max(certainty.max(), certainty.min() + 1e-9), _BINS + 1)
    bins = np.clip(np.digitize(certainty, edges) - 1, 0, _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    shares = np.bincount(bins, right, minlength=_BINS) / np.where(counts, counts, np.nan)
    figure = new_figure(2.6)
    figure.suptitle(title)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    has_samples = counts > 0
    above.plot(((edges[:-1] + edges[1:]) / 2)[has_samples], shares[has_samples], marker="o", color=COLORS[0])
    above.set(ylabel="share that is right", ylim=(0, 1.05))
    above.grid()
    below.stairs(counts, edges, fill=True, color=COLORS[5])
    below.set(xlabel="largest weight of the gate", ylabel="samples")
    return figure


def _classes_of(gated: GatedSamples, place: int, classes: Sequence[str] | None) -> tuple[str, str]:
    """A sample's class and the one that is predicted: their names, or their numbers if they have none."""
    given, predicted = int(gated.classes[place]), int(gated.predicted[place])
    return (classes[given], classes[predicted]) if classes else (str(given), str(predicted))


def _draw_weights(axes: Axes, weights: Tensor, said: str = "") -> None:
    """A bar of the experts' weights, the global ones from the left."""
    before = 0.0
    for expert, weight in enumerate(weights.tolist()):
        axes.barh(0, weight, left=before, color=COLORS[expert % len(COLORS)])
        before += weight
    axes.set(xlim=(0, 1), yticks=[], xticks=[])
    axes.set_xlabel(" ".join(f"{weight:.2f}" for weight in weights[:_COLUMNS].tolist()) + said)


def _name_experts(figure: Figure, experts: int, has_global_expert: bool) -> None:
    """Says which colour is which expert's."""
    names = [f"expert {expert}" for expert in range(experts)]
    names = ["global expert", "local expert"] if has_global_expert and experts == 2 else names
    patches = [Patch(color=COLORS[expert % len(COLORS)], label=name) for expert, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
