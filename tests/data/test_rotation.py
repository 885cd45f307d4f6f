"""Groups of clients with rotated images."""

import numpy as np
import pytest
import torch
from helpers.data import Own, pixels, random_images, refusal_of, set_up, vectors
from PIL import Image

from fedmoe_pl.data import Arrays, ImageFolder, NaturalIds, NpzFile


def of_shape(height, width) -> Arrays:
    x, y = torch.rand(4, 1, height, width), torch.zeros(4).long()
    return Arrays(x, y, x, y)


def source(image: torch.Tensor, among: torch.Tensor, angle: int) -> int:
    """Which of some images this is when turned back: numpy's rotation is the other way for negative numbers."""
    back = torch.from_numpy(np.rot90(image.numpy(), -(angle // 90), axes=(1, 2)).copy())
    (match,) = (among == back).flatten(1).all(dim=1).nonzero().flatten().tolist()
    return match


@pytest.mark.parametrize(
    ("rotations", "num_clients", "groups"),
    [([0, 180], 4, [0, 0, 180, 180]), ([0, 90, 180, 270], 4, [0, 90, 180, 270]), ([90, 0], 5, [90, 90, 90, 0, 0])],
)
def test_each_group_of_clients_shares_all_images_turned_by_its_angle(rotations, num_clients, groups):
    arrays = random_images()
    data = set_up(Own(arrays, num_clients=num_clients, rotations=rotations))
    assert data.num_clients == num_clients and len(data.x) == 52 * len(rotations)
    for parts, x, y in (
        (data.train_samples, arrays.x_train, arrays.y_train),
        (data.test_samples, arrays.x_test, arrays.y_test),
    ):
        for angle in rotations:
            clients = [client for client in range(num_clients) if groups[client] == angle]
            found = []
            for client in clients:
                for sample in parts[client]:
                    found.append(source(data.x[sample], x, angle))
                    assert data.y[sample] == y[found[-1]]
            assert sorted(found) == list(range(len(x)))  # each image once in each group
            sizes = [len(parts[client]) for client in clients]
            assert max(sizes) - min(sizes) <= 1
    assert data.global_test.tolist() == list(range(40 * len(rotations), 52 * len(rotations)))
    assert sorted(data.test_samples.indices.tolist()) == data.global_test.tolist()


def test_rotation_is_counterclockwise():
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    data = set_up(Own(Arrays(x, torch.tensor([0]), x, torch.tensor([0])), num_clients=2, rotations=[0, 90]))
    assert data.x[data.train_samples[1][0]].tolist() == [[[2.0, 4.0], [1.0, 3.0]]]


def test_images_of_a_file_can_be_rotated_before_normalization(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 3), dtype=np.uint8)
    y = np.arange(12) % 3
    np.savez(tmp_path / "own.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:])
    path = str(tmp_path / "own.npz")
    plain = set_up(NpzFile(path=path, num_clients=2))
    data = set_up(NpzFile(path=path, num_clients=2, rotations=[0, 180]))
    torch.testing.assert_close(data.x[:8], plain.x[:8])
    torch.testing.assert_close(data.x[8:16], plain.x[:8].flip(2, 3))
    torch.testing.assert_close(data.x[16:], torch.cat((plain.x[8:], plain.x[8:].flip(2, 3))))
    other = set_up(NpzFile(path=path, num_clients=2, rotations=[0, 180], partition_seed=1))
    assert data.train_samples[0].tolist() == other.train_samples[0].tolist() == list(range(8))


def test_files_are_those_of_the_copies(tmp_path):
    for index, folder in enumerate(("train/cat", "train/dog", "test/cat")):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(pixels(2, 2, 3)).save(tmp_path / folder / f"{index}.png")
    data = set_up(ImageFolder(str(tmp_path / "train"), str(tmp_path / "test"), num_clients=2, rotations=[0, 90]))
    assert data.files is not None and [path[-5] for path in data.files] == [*"010122"]


def test_several_labels_of_an_image_are_those_of_its_copies():
    x, y = torch.rand(3, 1, 2, 2), torch.rand(3, 2)
    data = set_up(Own(Arrays(x, y, x, y), num_clients=2, rotations=[0, 90]))
    assert torch.equal(data.y, torch.cat([y] * 4))


@pytest.mark.parametrize(
    ("arrays", "arguments", "sentence"),
    [
        (random_images(), {"pool": True, "test_fraction": 0.3}, "None, because pool is True, and other clients would"),
        (vectors(6), {}, "None for samples that are not images"),
        (of_shape(2, 3), {}, "0 and 180 for images that are not square, because 2 x 3 pixels become 3 x 2"),
    ],
)
def test_rotations_that_would_leak_or_that_cannot_be_are_refused(arrays, arguments, sentence):
    refusal = refusal_of(lambda: Own(arrays, num_clients=2, rotations=[0, 90], **arguments))
    assert f"rotations is [0, 90], but must be {sentence}" in str(refusal)


def test_images_that_are_not_square_can_be_turned_by_180_degrees():
    arrays = of_shape(2, 3)
    data = set_up(Own(arrays, partitioner=NaturalIds(), num_clients=2, rotations=[0, 180]))
    assert torch.equal(data.x[4:8], arrays.x_train.flip(2, 3))
