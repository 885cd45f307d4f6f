"""Arguments that would give a silently wrong number are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.data import Own, set_up
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data import Arrays, FromDatasets, NpzFile, Pathological

POINTS = Arrays(torch.zeros(4, 5), torch.arange(4), torch.zeros(4, 5), torch.arange(4))
NATURAL = replace(POINTS, client_train=np.arange(4), client_test=np.arange(4))


def texts(folder, **arguments):
    ids, labels = np.ones((4, 3), dtype=np.int64), np.arange(4)
    np.savez(folder / "texts.npz", x_train=ids, y_train=labels, x_test=ids, y_test=labels)
    set_up(NpzFile(str(folder / "texts.npz"), num_clients=2, **arguments))


GUARDS = {
    "std": lambda folder: replace(POINTS, std=[0.5]).check(),
    "std of a file": lambda folder: texts(folder, std=(0.5,)),
    "image_size": lambda folder: texts(folder, image_size=8),
    "test_fraction": lambda folder: set_up(Own(NATURAL, test_fraction=0.5)),
    "num_clients": lambda folder: set_up(Own(NATURAL, num_clients=3)),
    "concentration": lambda folder: Pathological(concentration=2.0),
    "targets": lambda folder: set_up(
        FromDatasets([(0.0, 0)] * 4, [(0.0, 0)] * 4, num_clients=2, targets=lambda dataset: [0.5] * 4)
    ),
}


@pytest.mark.parametrize("argument", GUARDS)
def test_what_would_give_a_wrong_number_is_refused(tmp_path, argument):
    with pytest.raises(MisconfigurationException, match=argument.split()[0]):
        GUARDS[argument](tmp_path)
