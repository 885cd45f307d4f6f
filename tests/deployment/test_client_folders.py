"""Hospitals with folders of images of their own, which no other machine sees."""

import numpy as np
import pytest
import torch
from helpers.deployed import Passing, federation
from PIL import Image
from torch import nn

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, FineTuning
from fedmoe_pl.data import ClientFolders
from fedmoe_pl.deployment import Participant, serve
from fedmoe_pl.models import GlobalOnly, LocalOnly

HOSPITALS = {"hospital_A": ("healthy",), "hospital_B": ("healthy", "tumour")}


@pytest.fixture
def roots(tmp_path):
    """A folder for each hospital's machine; hospital_A has no tumour."""
    for shade, (name, classes) in enumerate(HOSPITALS.items()):
        for of_class in classes:
            for index in range(6):
                path = tmp_path / f"machine of {name}" / name / of_class / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.full((2, 2, 3), 40 * index + 10 * shade, np.uint8)
                Image.fromarray(pixels).save(path)
    return [tmp_path / f"machine of {name}" for name in HOSPITALS]


def phases():
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly()),
        Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly()),
    ]


def model():
    torch.manual_seed(0)
    return PersonalizedMoE(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))


def data(root):
    known = {"classes": ["healthy", "tumour"], "mean": (0.0,) * 3, "std": (1.0,) * 3}
    return ClientFolders(str(root), test_fraction=0.5, batch_size=2, **known)


def test_each_trains_with_its_own_folder_and_its_name_stays_there(roots, tmp_path):
    machines = [tmp_path / f"run of {name}" for name in HOSPITALS]
    participants = {
        client: Participant(federation(phases(), folder, backend="auto"), model(), data(root), client, folder)
        for client, (root, folder) in enumerate(zip(roots, machines, strict=True))
    }
    transport = Passing(participants)
    server = federation(phases(), tmp_path / "server", backend="auto")
    serve(server, model(), data("nowhere"), transport, 2)
    assert server.run.states["PFL-FT"].round == 1
    sent = b"".join(message.to_bytes() for _, message in transport.passed)
    answered = b"".join(answer.to_bytes() for answer in transport.answers)
    files = b"".join(path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file())
    for name in HOSPITALS:
        assert name.encode() not in sent + answered + files
    assert b"FedAvg" in sent and b"FedAvg" in files, "the search finds what is there"
