"""Data modules that tests of the data set up, and what every refusal must be like."""

import re

from fedmoe_pl.data import Arrays, FederatedDataModule


class Own(FederatedDataModule):
    """A user's own data module of given arrays."""

    def __init__(self, arrays: Arrays, **kwargs):
        super().__init__(**kwargs)
        self.arrays = arrays

    def load(self) -> Arrays:
        return self.arrays


def set_up(datamodule: FederatedDataModule) -> FederatedDataModule:
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def assert_names_an_argument(message: str) -> None:
    """One sentence that begins with the argument, or with its class and the argument; the command line adds the key."""
    assert re.match(r"(?:\w+: )?\w+ (?:is|has|gives|reads|must) \S", message), message
    assert message.endswith(".") and "\n" not in message, message
