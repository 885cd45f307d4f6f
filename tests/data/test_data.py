"""Partitions, batches, augmentation, normalization, and the data module in a plain Trainer."""

import pickle
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torchvision.transforms.functional import to_tensor
from torchvision.transforms.v2 import functional

from fedmoe_pl.data import (
    IID,
    Arrays,
    Batches,
    Digits,
    Dirichlet,
    FederatedDataModule,
    NaturalIds,
    Partitioner,
    Parts,
    RandomCrop,
    RandomHorizontalFlip,
    partition_figure,
    partition_table,
)
from fedmoe_pl.rounds.checkpoint import fingerprint


class Own(FederatedDataModule):
    """Arrays that are at hand."""

    def __init__(self, arrays: Arrays, **kwargs):
        super().__init__(**kwargs)
        self.arrays = arrays

    def load(self) -> Arrays:
        return self.arrays


def vectors(n: int, num_classes: int = 3, n_test: int = 4, **kwargs) -> Arrays:
    """Sample i is the number i."""
    y = torch.arange(n + n_test) % num_classes
    x = torch.arange(float(n + n_test))[:, None]
    return Arrays(x[:n], y[:n], x[n:], y[n:], **kwargs)


def set_up(datamodule: FederatedDataModule) -> FederatedDataModule:
    datamodule.setup()
    return datamodule


sizes = st.tuples(st.integers(1, 200), st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**32)).filter(
    lambda size: size[1] <= size[0]
)


@given(sizes, st.sampled_from([IID(), Dirichlet(0.001), Dirichlet(0.5), Dirichlet(1e6)]))
@settings(max_examples=100, deadline=None)
def test_partition_is_disjoint_complete_and_reproducible(size, partitioner: Partitioner):
    n, num_clients, num_classes, seed = size
    labels = np.random.default_rng(seed).integers(0, num_classes, n)
    parts = partitioner(labels, num_clients, np.random.default_rng(seed))
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    again = partitioner(labels, num_clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@given(st.integers(1, 300), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_iid_parts_differ_by_one_sample_at_most(n, num_clients):
    if num_clients <= n:
        parts = IID()(np.zeros(n, dtype=np.int64), num_clients, np.random.default_rng(0))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.sampled_from(["f1", "a9", "z"]), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_natural_ids_keep_every_sample_with_its_client(ids):
    parts = NaturalIds()(np.zeros(len(ids)), None, np.random.default_rng(0), np.array(ids))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(ids)))
    for name, part in zip(sorted(set(ids)), parts, strict=True):
        assert {ids[i] for i in part} == {name}


@pytest.mark.parametrize(("alpha", "largest_share"), [(0.5, 0.38), (0.9, 0.31), (2, 0.22)])
def test_dirichlet_is_as_skewed_as_the_official_partition(alpha, largest_share):
    # computed with the official code: the mean share of a client's largest class, CIFAR-10's labels, 100 clients
    labels = np.arange(50_000) % 10
    parts = Dirichlet(alpha)(labels, 100, np.random.default_rng(0))
    shares = [np.bincount(labels[part], minlength=10).max() / len(part) for part in parts]
    assert np.mean(shares) == pytest.approx(largest_share, abs=0.02)


def test_a_huge_alpha_gives_every_client_the_same_share_of_every_class():
    labels = np.arange(1000) % 5
    for part in Dirichlet(1e12)(labels, 10, np.random.default_rng(0)):
        assert np.bincount(labels[part]).tolist() == [20] * 5


@given(st.integers(1, 12), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_held_once_and_every_client_can_train(num_clients, test_fraction, validation_fraction, seed):
    if test_fraction + validation_fraction >= 1:
        return
    fractions = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    data = set_up(Own(vectors(40), num_clients=num_clients, partition_seed=seed, **fractions))
    held = torch.cat([*data.train_samples, *data.validation_samples, *data.test_samples])
    assert held.sort().values.tolist() == list(range(40))
    assert data.global_test.tolist() == [40, 41, 42, 43]
    assert min(map(len, data.train_samples)) >= 1
    for client in range(num_clients):
        own = torch.cat((data.train_samples[client], data.validation_samples[client]))
        expected = torch.bincount(data.y[own], minlength=3).double() / len(own)
        torch.testing.assert_close(data.class_shares[client], expected)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
@settings(max_examples=50, deadline=None)
def test_parts_are_those_of_a_list_of_tensors(sizes, draw):
    samples = torch.randperm(sum(sizes))
    parts, expected = Parts(samples, torch.tensor(sizes)), list(samples.split(sizes))

    def as_lists(tensors):
        return [tensor.tolist() for tensor in tensors]

    assert len(parts) == len(expected) and as_lists(parts) == as_lists(expected)
    assert as_lists(parts[i] for i in range(-len(sizes), 0)) == as_lists(expected)
    assert as_lists(parts[1:-1:2]) == as_lists(expected[1:-1:2])
    chosen = draw.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=30))
    selected = parts.select(torch.tensor(chosen, dtype=torch.int64))
    assert as_lists(selected) == as_lists(expected[i] for i in chosen)
    assert selected.sizes.tolist() == [sizes[i] for i in chosen]
    assert parts.indices.data_ptr() == samples.data_ptr()  # nothing is copied
    with pytest.raises(IndexError):
        parts[len(sizes)]


def test_parts_are_pickled_as_two_tensors():
    parts = Parts(torch.arange(10_000), torch.ones(10_000, dtype=torch.int64))
    pickled = pickle.dumps(parts)
    assert len(pickled) < 2 * 8 * 10_000 + 2000
    assert [part.tolist() for part in pickle.loads(pickled)] == [[i] for i in range(10_000)]


@pytest.mark.parametrize("partitioner", [IID(), Dirichlet(0.9)])
@pytest.mark.parametrize("fractions", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.25), (0.05, 0.9)])
def test_every_client_splits_its_samples_by_a_seed_of_its_own(partitioner, fractions):
    data = Own(vectors(500), num_clients=20, partitioner=partitioner, partition_seed=3)
    data.test_fraction, data.validation_fraction = fractions
    data.setup()
    rng = np.random.default_rng(np.random.SeedSequence(3))
    for client, part in enumerate(partitioner(data.y[:500].numpy(), 20, rng)):
        n_test = min(round(len(part) * fractions[0]), len(part) - 1)
        n_validation = min(round(len(part) * fractions[1]), len(part) - 1 - n_test)
        if n_test + n_validation:
            part = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(client,))).permutation(part)
        held = [data.test_samples[client], data.validation_samples[client], data.train_samples[client]]
        for own, expected in zip(held, np.split(part, [n_test, n_test + n_validation]), strict=True):
            assert own.tolist() == expected.tolist()


def test_the_fingerprint_is_a_checksum_of_who_holds_which_labels():
    data = set_up(Own(vectors(50), num_clients=4, partitioner=Dirichlet(0.9), test_fraction=0.3))
    owned = torch.cat([*data.train_samples, *data.test_samples])
    checksum = zlib.crc32(data.y[owned].numpy().tobytes() + owned.numpy().tobytes())
    assert fingerprint(data) == f"4 clients, partition {checksum:08x}"


def test_the_partition_depends_on_its_seed_alone():
    def held(seed, global_seed):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        data = set_up(Digits(num_clients=5, partitioner=Dirichlet(0.5), test_fraction=0.2, partition_seed=seed))
        return [part.tolist() for part in (*data.train_samples, *data.test_samples)]

    assert held(0, 1) == held(0, 2)
    assert held(0, 1) != held(1, 1)


def test_setup_is_idempotent():
    data = set_up(Own(vectors(10), num_clients=2))
    x, parts = data.x, data.train_samples
    data.setup("test")
    assert data.x is x and data.train_samples is parts


def test_natural_clients_are_the_default_and_own_their_test_samples():
    arrays = vectors(3, client_train=np.array(["b", "a", "b"]), client_test=np.array(["b", "unseen", "b", "a"]))
    data = set_up(Own(arrays))
    assert data.num_clients == 2
    assert [part.tolist() for part in data.train_samples] == [[1], [0, 2]]
    assert [part.tolist() for part in data.test_samples] == [[6], [3, 5]]
    dealt = set_up(Own(arrays, num_clients=2, partitioner=IID()))
    assert [len(part) for part in dealt.test_samples] == [0, 0]


def test_images_are_normalized_like_torchvision():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (7, 3, 4, 5), dtype=torch.uint8)
    mean, std = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
    data = set_up(
        Own(Arrays(x[:5], torch.zeros(5).long(), x[5:], torch.ones(2).long(), mean=mean, std=std), num_clients=1)
    )
    for i in range(7):
        expected = functional.normalize(to_tensor(x[i].permute(1, 2, 0).numpy()), mean, std)
        assert torch.equal(data.x[i], expected)
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    black = functional.normalize(torch.zeros(3, 1, 1), mean, std)
    assert torch.equal(data.black, black)


def test_without_constants_the_training_images_have_mean_zero_and_deviation_one():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (50, 2, 4, 4), dtype=torch.uint8)
    x[:, 1] = 7  # of one single value: no division by zero
    data = set_up(Own(Arrays(x[:40], torch.zeros(40).long(), x[40:], torch.ones(10).long()), num_clients=1))
    train = data.x[:40].double()
    torch.testing.assert_close(train.mean((0, 2, 3)), torch.zeros(2).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std((0, 2, 3), correction=0), torch.tensor([1.0, 0.0]).double(), atol=1e-6, rtol=0)


def test_crop_is_torchvisions_crop_of_the_image_padded_with_black():
    x = torch.randn(20, 3, 6, 5)
    black = torch.tensor([-1.0, 2.0, 0.5]).view(3, 1, 1)
    cropped = RandomCrop(2)(x, torch.Generator().manual_seed(3), black)
    top, left = torch.randint(5, (2, 20), generator=torch.Generator().manual_seed(3)).tolist()
    for i in range(20):
        # cropping before normalization pads with 0, which normalization then turns into black
        padded = functional.pad(x[i] - black, [2])
        expected = functional.crop(padded, top[i], left[i], 6, 5) + black
        torch.testing.assert_close(cropped[i], expected)
    assert len({*top}) == len({*left}) == 5


def test_flip_mirrors_each_image_by_itself():
    x = torch.randn(200, 1, 3, 4)
    before = x.clone()
    flipped = RandomHorizontalFlip()(x, torch.Generator().manual_seed(0))
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    same = (flipped == x).flatten(1).all(1)
    assert torch.all(mirrored ^ same) and 70 < mirrored.sum() < 130
    assert torch.equal(x, before)
    assert torch.equal(RandomHorizontalFlip(0)(x), x)
    assert torch.equal(RandomHorizontalFlip(1)(x), x.flip(-1))


@given(st.integers(0, 600), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_batches_hold_every_sample_once(n, batch_size):
    x = torch.arange(1000.0)
    samples = torch.arange(1000)[-n:] if n else torch.arange(0)
    for shuffle in (False, True):
        batches = Batches(x, x.long(), samples, batch_size, shuffle=shuffle)
        seen = list(batches)
        assert len(seen) == len(batches)
        assert all(len(y) == batch_size for _, y in seen[:-1])
        assert all(torch.equal(a.long(), b) for a, b in seen)
        ys = [label for _, y in seen for label in y.tolist()]
        assert (sorted(ys) if shuffle else ys) == samples.tolist()


def test_a_generator_repeats_the_epochs_and_no_generator_follows_the_global_seed():
    data = set_up(Digits(num_clients=2, augmentation=[RandomCrop(1), RandomHorizontalFlip()]))

    def two_epochs(batches):
        return torch.cat([x for _ in range(2) for x, _ in batches])

    def seeded(seed):
        return two_epochs(data.batches(data.train_samples[0], 7, torch.Generator().manual_seed(seed), augment=True))

    assert torch.equal(seeded(1), seeded(1)) and not torch.equal(seeded(1), seeded(2))
    first, second = seeded(1).chunk(2)
    assert not torch.equal(first, second)
    pooled = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pooled.append(two_epochs(data.train_dataloader()))
    assert torch.equal(pooled[0], pooled[1]) and not torch.equal(pooled[0], pooled[2])
    plain = torch.cat([x for x, _ in data.batches(data.train_samples[0], 7)])
    assert torch.equal(plain, data.x[data.train_samples[0]])


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen = {"train": 0, "val": 0, "test": 0}

    def loss(self, batch, part):
        x, y = batch
        self.seen[part] += len(x)
        return torch.nn.functional.cross_entropy(self.layer(x.flatten(1)), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.loss(batch, "val"))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch, "test"))

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(1)).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# PyTorch deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_a_plain_trainer_takes_the_data_module_without_a_warning(tmp_path):
    data = Digits(num_clients=4, validation_fraction=0.25, augmentation=[RandomCrop(1)])
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Linear()
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    predictions = trainer.predict(module, data)
    assert predictions is not None
    assert module.seen["train"] == sum(map(len, data.train_samples))
    assert module.seen["val"] > sum(map(len, data.validation_samples)) > 0  # Lightning's sanity check comes first
    assert sum(map(len, predictions)) == module.seen["test"] == len(data.global_test)


def test_there_is_no_validation_loader_without_validation_samples():
    assert set_up(Own(vectors(10), num_clients=2)).val_dataloader() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet(0), r"Dirichlet: alpha is 0, "),
        (lambda: Dirichlet(float("nan")), r"alpha is nan, "),
        (lambda: RandomCrop(0), r"RandomCrop: padding is 0, "),
        (lambda: RandomHorizontalFlip(1.5), r"RandomHorizontalFlip: p is 1\.5, "),
        (lambda: Digits(num_clients=0), r"Digits: num_clients is 0, "),
        (lambda: Digits(batch_size=0), r"Digits: batch_size is 0, "),
        (lambda: Digits(partition_seed=-1), r"Digits: partition_seed is -1, "),
        (lambda: Digits(image_size=0), r"Digits: image_size is 0, "),
        (lambda: Digits(test_fraction=1), r"Digits: test_fraction is 1, "),
        (lambda: Digits(validation_fraction=-0.1), r"Digits: validation_fraction is -0\.1, "),
        (lambda: Digits(test_fraction=0.5, validation_fraction=0.5), r"test_fraction is 0\.5 and "),
        (lambda: Batches(torch.ones(1), torch.ones(1), torch.arange(1), 0), r"batch_size is 0, "),
    ],
)
def test_bad_arguments_are_refused_at_once(make, message):
    with pytest.raises(MisconfigurationException, match=message) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


ids = np.array([0, 0, 1, 1, 2, 2])
nan = torch.full((6, 1), float("nan"))
images = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
y = torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize(
    ("arrays", "kwargs", "message"),
    [
        (vectors(6), {}, r"num_clients is not set, .* IID"),
        (vectors(6), {"num_clients": 7}, r"num_clients is 7, .* 6 training samples"),
        (
            vectors(6),
            {"num_clients": 5, "partitioner": Dirichlet(1e-3)},
            r"client \d of 5 without training samples; lower num_clients, raise alpha above 0\.001",
        ),
        (vectors(6), {"partitioner": NaturalIds()}, r"partitioner is NaturalIds, but"),
        (vectors(6, client_train=ids), {"num_clients": 2}, r"num_clients is 2, but the data have 3 natural clients"),
        (
            vectors(6, client_train=ids, client_test=ids[:4]),
            {"test_fraction": 0.1},
            r"Own: test_fraction is 0\.1, but must be 0, because",
        ),
        (
            vectors(6),
            {"num_clients": 1, "augmentation": [RandomCrop()]},
            r"Own: augmentation must be left out for samples of shape",
        ),
        (vectors(6, client_train=ids[:5]), {}, r"Arrays: client_train has shape \(5,\)"),
        (
            vectors(6, client_test=ids[:4]),
            {"num_clients": 1},
            r"client_train is None, but must be given where client_test is",
        ),
        (vectors(0), {"num_clients": 1}, r"x_train holds no samples"),
        (vectors(6, n_test=0), {"num_clients": 1}, r"x_test holds no samples"),
        (Arrays(nan, y, nan, y), {"num_clients": 1}, r"x_train holds values that are not finite"),
        (Arrays(images, y - 1, images, y), {"num_clients": 1}, r"y_train holds torch\.int64 numbers from -1"),
        (Arrays(images, y.float(), images, y), {"num_clients": 1}, r"labels must be integers"),
        (Arrays(images, y[:5], images, y), {"num_clients": 1}, r"y_train has shape \(5,\), .* 6 samples"),
        (Arrays(images, y, images[..., :3], y), {"num_clients": 1}, r"but both must be the same"),
        (Arrays(images[0], y[:3], images[0], y[:3]), {"num_clients": 1}, r"must be uint8 images"),
        (Arrays(images, y, images, y, mean=[0.5]), {"num_clients": 1}, r"mean is \[0\.5\] and std is None"),
        (Arrays(images, y, images, y, mean=[0.5], std=[0.5]), {"num_clients": 1}, r"each of the 3 channels"),
        (Arrays(images, y, images, y, mean=[0] * 3, std=[0] * 3), {"num_clients": 1}, r"std only numbers above 0"),
        (
            vectors(6, mean=[0.5], std=[0.5]),
            {"num_clients": 1},
            r"mean is \[0\.5\], but must be None for torch\.float32 samples",
        ),
    ],
)
def test_data_that_cannot_be_shared_out_are_refused_in_one_sentence(arrays, kwargs, message):
    with pytest.raises(MisconfigurationException, match=message) as error:
        Own(arrays, **kwargs).setup()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("num_clients", [1, 5, 40, 41, 300, 1001])
def test_the_table_and_the_figure_show_who_holds_what(num_clients, tmp_path):
    data = set_up(Own(vectors(6000), num_clients=num_clients, test_fraction=0.1, validation_fraction=0.1))
    lines = partition_table(data).splitlines()
    assert lines[0] == f"{num_clients} clients, 3 classes, 6000 training samples, 4 global test samples"
    assert len({len(line) for line in lines[2:]}) == 1
    assert len(lines) == 8 + min(num_clients, 41)  # 40 clients and a line of dots
    assert lines[2].split() == ["client", "train", "validation", "test", *"class 0 class 1 class 2".split()]
    first = [int(cell) for cell in lines[4].split()]
    assert first == [
        0,
        *(len(part[0]) for part in (data.train_samples, data.validation_samples, data.test_samples)),
    ] + [int(count) for count in data.class_counts()[0]]
    partition_figure(data).savefig(tmp_path / "figure.png")


def test_many_classes_are_summed_up_in_the_table():
    data = set_up(Own(vectors(100, num_classes=62), num_clients=2))
    header = partition_table(data).splitlines()[2]
    assert header.split() == ["client", "train", "classes", "largest", "class", "its", "samples"]
