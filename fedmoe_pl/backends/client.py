"""What every backend does for a client before and after its local training (DESIGN section 3)."""

from __future__ import annotations

import copy
import inspect
import logging
import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from fedmoe_pl.algorithms.algorithm import Algorithm, Client
from fedmoe_pl.backends.backend import LocalTraining
from fedmoe_pl.data import Batches, FederatedDataModule
from fedmoe_pl.models import MixtureOfExperts, SwitchNorm1d
from fedmoe_pl.seeds import derive_seed, seed_all
from fedmoe_pl.trees import Tree

LEAN_TRAINER: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}
"""Defaults of a client's Trainer: what costs time for every client and belongs to the federation is off."""

_CLIENT = 0  # tells a client's stream of random numbers from those of cohorts and splits

# What a lean Trainer honours, or what changes nothing in a step; any other argument must have its default.
_LEAN_ARGUMENTS = {
    *("accelerator", "devices", "max_epochs", "precision", "gradient_clip_val", "gradient_clip_algorithm", "callbacks"),
    *("enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "check_val_every_n_epoch"),
    *(
        "log_every_n_steps",
        "deterministic",
        "benchmark",
        "inference_mode",
        "default_root_dir",
        "enable_autolog_hparams",
    ),
}
_BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step",),
)
_MODULE_HOOKS = (
    *_BATCH_HOOKS,
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "validation_step", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def client_seed(training: LocalTraining, client_id: int, round: int) -> int:
    """The seed of everything that a client draws in a round."""
    return derive_seed(training.seed, _CLIENT, client_id, round)


def begin_client(
    training: LocalTraining, module: LightningModule, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int
) -> tuple[Client, dict[str, Any], Tensor]:
    """Seeds the client's random numbers and loads its state into a module with the phase's initial tensors.

    Returns:
        The client, the constants for its loss as the algorithm made them, and the indices of the samples that it
        trains on.
    """
    algorithm = training.algorithm
    seed_all(client_seed(training, client_id, round))
    sent = algorithm.server_send(server, client_id)
    client = Client(
        id=client_id,
        round=round,
        seed=training.seed,
        module=module,
        samples=training.datamodule.train_samples[client_id],
        kept=kept.get(client_id, {}),
        loaded={**training.initial, **sent},
        datamodule=training.datamodule,
    )
    const = algorithm.client_init(client, sent)
    return client, const, algorithm.client_samples(client)


def on_device(const: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The constants of a client's loss with all tensors, however nested, on the device where it trains."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, const)


def client_batches(training: LocalTraining, client: Client, samples: Tensor) -> Batches:
    """The client's training batches of this round: shuffled and augmented by a generator of its own."""
    return training.datamodule.batches(
        samples,
        batch_size=training.batch_size,
        generator=Generator().manual_seed(client_seed(training, client.id, client.round)),
        augment=True,
        drop_single=has_batch_norm(client.module),
        device=training.device,
    )


def trainable_names(training: LocalTraining, module: nn.Module, round: int, epoch: int | None = None) -> list[str]:
    """Names of the parameters that are trained in a local epoch, or in any of them (None)."""
    epochs = range(training.max_epochs) if epoch is None else [epoch]
    is_trainable = training.algorithm.is_trainable
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and any(is_trainable(name, round, epoch) for epoch in epochs)
    ]


def data_on(datamodule: FederatedDataModule, device: torch.device) -> FederatedDataModule:
    """The data module with its samples on a GPU, if they fit into half of its free memory; else as it is."""
    if device.type != "cuda" or datamodule.x.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return datamodule
    placed = copy.copy(datamodule)
    placed.x = datamodule.x.to(device)
    return placed


def changes_loss(algorithm: Algorithm) -> bool:
    """Whether the algorithm has a local loss of its own, for which the module must have a method ``loss(batch)``."""
    return type(algorithm).client_loss is not Algorithm.client_loss


def trains_by_loss(algorithm: Algorithm, module: LightningModule) -> bool:
    """Whether clients train by ``Algorithm.client_loss``, in place of the module's own ``training_step``."""
    if changes_loss(algorithm):
        return True
    return isinstance(module, MixtureOfExperts) and not overridden_hooks(module)


def overridden_hooks(module: LightningModule) -> list[str]:
    """Hooks of Lightning that a user's module has and that training by ``client_loss`` would not call."""
    base = MixtureOfExperts if isinstance(module, MixtureOfExperts) else LightningModule
    hooks = _MODULE_HOOKS + (("training_step",) if base is MixtureOfExperts else ())
    return [name for name in hooks if getattr(type(module), name) is not getattr(base, name)]


def has_batch_norm(module: LightningModule) -> bool:
    """Whether the module has batch normalization, which refuses to train on one sample (METHODS section 2)."""
    return any(isinstance(part, (_BatchNorm, SwitchNorm1d)) for part in module.modules())


def needs_every_batch(training: LocalTraining) -> str | None:
    """Why a client's Trainer must see every batch by itself; None if its epochs can run inside one training step."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    for name, value in training.trainer.items():
        lean = name in _LEAN_ARGUMENTS or value == LEAN_TRAINER.get(name, defaults[name])
        if not lean or (name == "precision" and value not in (None, 32, "32", "32-true", "bf16", "bf16-mixed")):
            return f"trainer.{name} is {value}"
    for callback in _callbacks(training):
        hooks = [hook for hook in _BATCH_HOOKS if getattr(type(callback), hook) is not getattr(Callback, hook)]
        from_lightning = type(callback).__module__.startswith("lightning.") and not isinstance(callback, EarlyStopping)
        if hooks or from_lightning:
            return f"the callback {type(callback).__name__} sees every batch"
    if not trains_by_loss(training.algorithm, training.module):
        return f"{type(training.module).__name__} has a training_step or hooks of its own"
    try:
        configured = training.module.configure_optimizers()
    except Exception as error:  # it may need its Trainer
        return f"configure_optimizers needs more than the model ({type(error).__name__}: {error})"
    return _unusual_optimizer(configured)


def _unusual_optimizer(configured: Any) -> str | None:
    """Why one loop cannot step what ``configure_optimizers`` returned."""
    optimizer, _ = optimizer_and_scheduler(configured)
    if optimizer is None:
        return "configure_optimizers returns more than an optimizer and a scheduler stepped once an epoch"
    if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
        return f"{type(optimizer).__name__} needs a closure"
    return None


def optimizer_and_scheduler(configured: Any) -> tuple[torch.optim.Optimizer | None, LRScheduler | None]:
    """The optimizer, and the scheduler stepped once an epoch if any; None for what is more than that."""
    if isinstance(configured, (list, tuple)) and len(configured) == 1:
        (configured,) = configured
    if isinstance(configured, dict) and set(configured) == {"optimizer"}:
        configured = configured["optimizer"]
    if isinstance(configured, torch.optim.Optimizer):
        return configured, None
    if isinstance(configured, dict) and set(configured) == {"optimizer", "lr_scheduler"}:
        scheduler = configured["lr_scheduler"]
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if isinstance(scheduler, LRScheduler) and not plateau:
            return configured["optimizer"], scheduler
    return None, None


def _callbacks(training: LocalTraining) -> Sequence[Callback]:
    callbacks = training.trainer.get("callbacks") or []
    return callbacks if isinstance(callbacks, list) else [callbacks]


class _OneStep:
    """A loader of a single item, the batches of an epoch; a list would be taken for a list of loaders."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Iterable[Any]]:
        yield self.batches


class EpochModule(LightningModule, ABC):
    """Trains a whole epoch in one training step, by manual optimization: a bare loop inside the Trainer.

    A Trainer takes 0.3 ms a step, as much as a step of a small model (DESIGN section 4). Subclasses say what a step is.
    """

    def __init__(self, clip_val: float | None, clip_algorithm: str | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip_val = clip_val
        self.clip_algorithm = clip_algorithm

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """What is differentiated."""

    def differentiate(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Leaves the gradients in the optimizer's parameters."""
        optimizer.zero_grad()
        loss.backward()

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips the gradients as the Trainer was told to."""
        self.clip_gradients(optimizer, self.clip_val, self.clip_algorithm)

    def training_step(self, batches: Iterable[Any], batch_idx: int) -> None:
        """One epoch."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        mixed = torch.is_autocast_enabled(self.device.type)
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        for batch in batches:
            loss = self.loss(batch)
            # the ordinary way has left autocast before it goes back, too
            with torch.autocast(self.device.type, enabled=False) if mixed else nullcontext():
                self.differentiate(loss, optimizer)
                if self.clip_val is not None:
                    self.clip(optimizer)
                optimizer.step()
            progress.completed += 1  # what global_step counts
            if mixed:
                torch.clear_autocast_cache()  # it holds the parameters in half precision as they were before the step

    def on_train_epoch_end(self) -> None:
        """Steps the scheduler, which the Trainer leaves to manual optimization."""
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def fit_epochs(
    training: LocalTraining,
    module: EpochModule,
    batches: Iterable[Any],
    validation: Batches | None,
    freezing: Callback,
) -> Trainer:
    """Fits with a lean Trainer."""
    given = {"gradient_clip_val": None, "gradient_clip_algorithm": None}  # manual optimization refuses them
    return fit(training, module, _OneStep(batches), validation, freezing, **given)


def fit(
    training: LocalTraining,
    module: LightningModule,
    batches: Iterable[Any],
    validation: Batches | None,
    freezing: Callback,
    **arguments: Any,
) -> Trainer:
    """Fits with a Trainer of its own: one serves one fit, and making it takes a few milliseconds.

    Args:
        training: has the Trainer's arguments.
        module: what to fit.
        batches: training batches.
        validation: validation batches; None for none.
        freezing: the callback that freezes what is not trained.
        arguments: arguments of the Trainer that take the place of those in ``training``.
    """
    given = copy.deepcopy(training.trainer) | arguments
    callbacks = given.pop("callbacks", None) or []
    callbacks = [freezing, *(callbacks if isinstance(callbacks, list) else [callbacks])]
    given["devices"] = [training.device.index or 0] if training.device.type == "cuda" else 1
    with quiet():
        trainer = Trainer(callbacks=callbacks, **given)
        try:
            trainer.fit(module, batches, validation)
        except SystemExit as exit:
            if not trainer.interrupted:
                raise
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from its exit on
            raise KeyboardInterrupt from exit
    return trainer


class Freezing(Callback):
    """Trains what the algorithm says is trainable in this epoch, and freezes the rest."""

    def __init__(self, training: LocalTraining, module: LightningModule, round: int) -> None:
        self.training = training
        self.module = module
        self.round = round
        self.frozen: list[nn.Module] = []
        self.frozen_by_user = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}

    def freeze(self, epoch: int) -> None:
        """Freezes what is not trained in an epoch."""
        for name, parameter in self.module.named_parameters():
            trainable = self.training.algorithm.is_trainable(name, self.round, epoch)
            parameter.requires_grad_(trainable and name not in self.frozen_by_user)
        if not self.training.algorithm.frozen_train_mode:
            self.frozen = [
                submodule for submodule in self.module.modules() if submodule.training and _is_frozen(submodule)
            ]
            for submodule in self.frozen:
                submodule.eval()

    def melt(self) -> None:
        """Puts frozen modules back into train mode, because another part may be frozen in the next epoch."""
        for submodule in self.frozen:
            submodule.train()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freezes."""
        self.freeze(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Melts."""
        self.melt()


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one CPU thread.

    Small models gain little from more and stall when another process holds a core, and results do not depend on the
    machine's number of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what Lightning says at every fit ("GPU available: ...") out of the federation's output."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # A client without validation samples is not a mistake.
            warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
            # lightning 2.6 with torch 2.14 and newer; nothing that a user could mend.
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
