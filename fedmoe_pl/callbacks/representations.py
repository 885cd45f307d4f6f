"""Figures of the representations that a ``RepresentationMoE`` computes (pFedMoE's t-SNE figures)."""

from __future__ import annotations

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.callbacks.figures import figure_pixels, representation_figure
from fedmoe_pl.callbacks.tensorboard import method_tag, tensorboard_writers
from fedmoe_pl.models.mixtures.representation import RepresentationMoE, Representations
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class RepresentationMonitor(FederationCallback):
    """Shows in TensorBoard, at the end of a phase, the representations of some clients' samples by their own models.

    A t-SNE figure (scikit-learn) shows the representations of the shared extractor, of the local one, and mixed by the
    gate. The projector shows the mixed ones with class and client of every sample. A client's samples are its held-out
    ones, or training samples if it has none. Models other than ``RepresentationMoE`` are skipped.

    Args:
        clients: ids of the clients that are shown; None for 0, 1 and 2.
        samples_per_client: the largest number of samples of each client; its first ones are shown.

    Raises:
        MisconfigurationException: if there is no client, an id is negative, or ``samples_per_client`` is below 1.
    """

    def __init__(self, clients: list[int] | None = None, samples_per_client: int = 100) -> None:
        self.clients = [0, 1, 2] if clients is None else clients
        if not self.clients or min(self.clients) < 0 or samples_per_client < 1:
            raise MisconfigurationException(
                f"RepresentationMonitor: clients is {clients} and samples_per_client {samples_per_client}, but there "
                "must be at least one of each, and ids from 0 on."
            )
        self.samples_per_client = samples_per_client

    def on_fit_start(self, run: Run) -> None:
        """Refuses ids that no client has.

        Raises:
            MisconfigurationException: if there is such an id.
        """
        if max(self.clients) >= run.datamodule.num_clients:
            raise MisconfigurationException(
                f"RepresentationMonitor: clients has {max(self.clients)}, but must be ids below num_clients, "
                f"{run.datamodule.num_clients}."
            )

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Computes and shows the representations."""
        writers = tensorboard_writers(run)
        if evaluation is None or not writers or not isinstance(run.module(phase), RepresentationMoE):
            return
        representations, classes, owners = self.compute(run, phase.name)
        points = {name: embed(values, run.seed) for name, values in representations._asdict().items()}
        pixels = figure_pixels(representation_figure(phase.name, points, classes.numpy(), owners.numpy()))
        tag = f"representations/{method_tag(evaluation.method)}"
        metadata = [list(row) for row in zip(classes.tolist(), owners.tolist(), strict=True)]
        for writer in writers:
            writer.add_image(tag, pixels, run.step, dataformats="HWC")
            writer.add_embedding(
                representations.mixed,
                metadata=metadata,
                metadata_header=["class", "client"],
                global_step=run.step,
                tag=method_tag(evaluation.method),
            )

    def compute(self, run: Run, method: str) -> tuple[Representations, Tensor, Tensor]:
        """The representations of the clients' samples by their own models.

        Args:
            run: a run that has finished the phase.
            method: the phase's name.

        Returns:
            Representations, each of shape (n, F); the samples' classes and their clients, shape (n,).
        """
        datamodule, parts = run.datamodule, []
        for client in self.clients:
            held_out = datamodule.test_samples[client]
            samples = (held_out if len(held_out) else datamodule.train_samples[client])[: self.samples_per_client]
            module = run.client_module(method, client)
            assert isinstance(module, RepresentationMoE), "the phase has such a model"
            (x, y), *_ = datamodule.batches(samples, batch_size=len(samples))
            with torch.inference_mode():
                parts.append((*module.representations(x.cpu()), y.cpu(), torch.full_like(y.cpu(), client)))
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return Representations(*columns[:3]), columns[3], columns[4]


def embed(representations: Tensor, seed: int) -> np.ndarray:
    """Points (n, 2) of t-SNE for representations (n, F), n at least 3; the same in every call."""
    from sklearn.manifold import TSNE  # slow to import, and only needed here

    neighbours = min(30.0, (len(representations) - 1) / 3)
    return TSNE(perplexity=neighbours, init="random", random_state=seed % 2**32).fit_transform(
        representations.double().numpy()
    )
