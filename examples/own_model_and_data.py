"""Your own LightningModule and your own dataset: each client alone, FedAvg, and fine-tuning after FedAvg.

Run it with ``python examples/own_model_and_data.py``; it takes seconds.
"""

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fedmoe_pl import Evaluate, Federation, Phase, Train
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.data import Dirichlet, FromDatasets


class Classifier(LightningModule):
    """An ordinary module, which also works in a plain Trainer."""

    def __init__(self, hidden: int = 16, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(30, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (B, 2) of tumours (B, 30)."""
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Training and test samples: 569 tumours, benign or not. Any map-style dataset can take their place."""
    x, y = (torch.from_numpy(array) for array in load_breast_cancer(return_X_y=True))
    is_test = torch.arange(len(y)) % 5 == 0
    x = ((x - x[~is_test].mean(0)) / x[~is_test].std(0)).float()
    return TensorDataset(x[~is_test], y[~is_test]), TensorDataset(x[is_test], y[is_test])


def main() -> None:
    """Trains six clients, whose classes differ, and loads the model of one of them."""
    torch.manual_seed(0)
    train, test = datasets()
    federation = Federation(
        phases=[
            Phase("Local", Local(), train=Train(max_epochs=20)),
            Phase("FedAvg", FedAvg(), rounds=10),
            Phase(
                "fine-tuned", Local(), start="FedAvg", train=Train(max_epochs=10), evaluate=Evaluate(every_n_epochs=5)
            ),
        ],
        trainer={"max_epochs": 2, "accelerator": "cpu"},
        name="tumours",
    )
    data = FromDatasets(train, test, num_clients=6, partitioner=Dirichlet(0.5), test_fraction=0.25)
    results = federation.fit(Classifier(), data)
    print("held-out samples:", results["fine-tuned"].spread("local_test"))

    checkpoint = federation.run_dir / "client_003.ckpt"
    federation.export(Classifier(), data, method="fine-tuned", client=3, format="lightning", output=str(checkpoint))
    module = Classifier.load_from_checkpoint(checkpoint)
    print("classes of three tumours:", module(test.tensors[0][:3]).argmax(dim=1).tolist())


if __name__ == "__main__":
    main()
