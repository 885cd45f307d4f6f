"""A method's own run in loggers whose pages compare runs: MLflow, and Weights & Biases."""

from __future__ import annotations

import copy
import re

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from typing_extensions import TypeIs


def compares_runs(logger: Logger) -> TypeIs[MLFlowLogger | WandbLogger]:
    """Whether a method gets a run of its own."""
    return isinstance(logger, MLFlowLogger | WandbLogger)


def begin(logger: MLFlowLogger | WandbLogger, method: str) -> MLFlowLogger | WandbLogger:
    """A logger of the method's run, which belongs to the logger's; the same run again where there is one already."""
    return _of_mlflow(logger, method) if isinstance(logger, MLFlowLogger) else _of_wandb(logger, method)


def end(logger: MLFlowLogger | WandbLogger, status: str) -> None:
    """Ends a method's run; Lightning leaves those of Weights & Biases open until the process ends."""
    logger.finalize(status)
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=int(status != "success"))


def _of_mlflow(logger: MLFlowLogger, method: str) -> MLFlowLogger:
    """Below the logger's run, with its tags."""
    from mlflow.utils.mlflow_tags import (  # pyright: ignore[reportMissingImports]  optional
        MLFLOW_PARENT_RUN_ID,
        MLFLOW_RUN_NAME,
    )

    client, experiment = logger.experiment, logger.experiment_id
    found = client.search_runs([experiment], f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{logger.run_id}'")
    run = next((run for run in found if run.info.run_name == method), None)
    if run is None:
        tags = {**client.get_run(logger.run_id).data.tags, MLFLOW_PARENT_RUN_ID: logger.run_id, MLFLOW_RUN_NAME: method}
        run = client.create_run(experiment, tags=tags)
    own = copy.copy(logger)
    own._run_id = run.info.run_id
    return own


def _of_wandb(logger: WandbLogger, method: str) -> WandbLogger:
    """In a group with the name of the logger's run, unless that has a group."""
    import wandb  # pyright: ignore[reportMissingImports]  optional

    of_all = logger.experiment
    own = {"name": method, "id": f"{of_all.id}-{_of_plain_characters(method)}", "reinit": "create_new"}
    group = {"group": of_all.name or of_all.id, "job_type": "method"}
    chosen = {name: value for name, value in logger._wandb_init.items() if value is not None}
    run = wandb.init(**{**group, **chosen, **own})
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, prefix=logger._prefix)


def _of_plain_characters(name: str) -> str:
    """A text without characters that an id may not have, another one for every name."""
    return re.sub(r"[^-.0-9A-Za-z]", lambda found: f"_{ord(found[0]):x}_", name)
