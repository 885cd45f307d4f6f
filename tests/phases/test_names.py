"""Names that become names of files stay where they belong."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Federation, Phase
from fedmoe_pl.algorithms import FedAvg


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "a\0b", "a\nb", "a" * 300, "ä" * 150, " a", "\ud800", "initial"]
)
def test_a_phase_has_a_name_that_a_file_can_have(name):
    with pytest.raises(MisconfigurationException, match=r"^Phase: name is .*, but must be printable") as error:
        Phase(name, FedAvg())
    assert str(error.value).isprintable()
    assert Phase("PFL MFE, ½", FedAvg()).name == "PFL MFE, ½"


@pytest.mark.parametrize("name", ["../../x", "..", "/tmp/x", "a/../../b", "a\0b", "x" * 300])
def test_runs_stay_below_their_folder(name, tmp_path):
    with pytest.raises(MisconfigurationException, match="but must be that of a folder below default_root_dir"):
        Federation([Phase("p", FedAvg())], name=name, default_root_dir=str(tmp_path))
    run = Federation([Phase("p", FedAvg())], name="digits/quick", default_root_dir=str(tmp_path))
    assert run.runs == tmp_path / "digits/quick"
