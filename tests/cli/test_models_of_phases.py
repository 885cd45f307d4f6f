"""Modules with hyperparameters, as the model of a configuration and as that of a phase."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.cli import main
from fedmoe_pl.models import SmallMLP


class Net(LightningModule):
    def __init__(self, width: int = 3, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Wrapped(PersonalizedMoE):
    """Differs from others of its class in a nested class only."""

    def __init__(self, global_expert: SmallMLP):
        super().__init__(global_expert)
        self.save_hyperparameters(ignore="global_expert")


def run(tmp_path, model: str, *models: str) -> dict:
    """The checkpoint of each phase's model, by the phase's name."""
    phases = [f"{{name: '{i}', algorithm: FedAvg, model: {own}}}" for i, own in enumerate((model, *models))]
    (tmp_path / "own.yaml").write_text(f"""
model: {model}
data: {{class_path: Digits, init_args: {{num_clients: 2, partitioner: IID, batch_size: 300}}}}
trainer: {{accelerator: cpu}}
federation: {{logger: false, default_root_dir: {tmp_path}, phases: [{", ".join(phases)}]}}
""")
    main(["fit", "--config", str(tmp_path / "own.yaml"), "--federation.enable_progress_bar=false"])
    return {path.parent.name: path for path in tmp_path.rglob("all_clients.ckpt")}


def of_net(width: int, lr: float) -> str:
    return f"{{class_path: {__name__}.Net, init_args: {{width: {width}, lr: {lr}}}}}"


def test_each_module_has_its_own_hyperparameters_and_trains_with_its_own_rate(tmp_path):
    paths = run(tmp_path, of_net(8, 0.0), of_net(4, 0.5), of_net(4, 0.25))
    for phase, width, lr in (("0", 8, 0.0), ("1", 4, 0.5), ("2", 4, 0.25)):
        module = Net.load_from_checkpoint(paths[phase])
        assert (module.hparams.width, module.hparams.lr, module.net[1].out_features) == (width, lr, width)
    moved = {}
    for phase in paths:
        states = [torch.load(paths[phase])["state_dict"]["net.2.bias"]]
        states.append(torch.load(next(tmp_path.rglob("last.ckpt")))["models"][phase]["net.2.bias"])
        moved[phase] = not torch.equal(*states)
    assert moved == {"0": False, "1": True, "2": True}, "a rate of 0 trains nothing"


def test_modules_that_differ_in_a_nested_class_are_told_apart(tmp_path):
    def model(hidden):
        expert = f"{{class_path: SmallMLP, init_args: {{hidden_features: {hidden}}}}}"
        return f"{{class_path: {__name__}.Wrapped, init_args: {{global_expert: {expert}}}}}"

    paths = run(tmp_path, model(5), model(6), model(7))
    for phase, hidden in (("0", 5), ("1", 6), ("2", 7)):
        expert = torch.load(paths[phase], weights_only=False)["hyper_parameters"]["global_expert"]
        assert expert["init_args"]["hidden_features"] == hidden
