"""The mixture of experts without a federation: an ordinary module in an ordinary Trainer.

Run it with ``python examples/plain_trainer.py``; it takes seconds.
"""

from functools import partial

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.models import FeatureGate, SmallMLP


def main() -> None:
    """Trains two experts and their gate together on digits, and shows how the gate weighs some samples."""
    seed_everything(0)
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    train, validation = random_split(TensorDataset(images, labels), [0.8, 0.2])
    model = PersonalizedMoE(SmallMLP(), gate=FeatureGate(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))

    trainer = Trainer(max_epochs=5, accelerator="cpu", logger=CSVLogger("runs/plain"), log_every_n_steps=10)
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=256))

    x, y = next(iter(DataLoader(validation, batch_size=256)))
    with torch.inference_mode():
        logits, weights = model.eval().mix(x)
    print("accuracy:", round((logits.argmax(dim=1) == y).float().mean().item(), 3))
    print("weights of global and local expert on three samples:", weights[:3].double().numpy().round(3).tolist())


if __name__ == "__main__":
    main()
