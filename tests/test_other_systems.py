"""What works where calls of Linux are missing, as on macOS and Windows: pretended, in a Python of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import data, federation, model

# torch and Lightning are imported first, because they ask which system it is, too
CODE = """
import os, signal, socket, sys
import lightning.pytorch, torchmetrics, torchvision, scipy.stats, sklearn.datasets, tensorboard, multiprocessing.util

for module, names in {
    os: "fork sched_getaffinity sched_setaffinity sync",
    signal: "SIGALRM setitimer pthread_sigmask SIGHUP",
    socket: "send_fds recv_fds",
}.items():
    for name in names.split():
        delattr(module, name)
sys.platform = "darwin"

import fedmoe_pl.cli.command_line
from helpers.runs import data, federation, model
from fedmoe_pl import ClientFailures
from fedmoe_pl.checks import InvalidArgumentError

folder = sys.argv[1]
results = federation(folder).fit(model(), data())
for name, arguments in {
    "devices": {"trainer": {"accelerator": "cpu", "devices": 2}},
    "timeout": {"failures": ClientFailures(timeout=9.0)},
}.items():
    try:
        federation(folder, **arguments).fit(model(), data())
    except InvalidArgumentError as error:
        assert name in error.argument, error
        print(error)
print([evaluation.spread("global_test").mean for evaluation in results.values()])
"""


@pytest.mark.slow  # a Python that imports everything
def test_elsewhere_one_process_trains_and_what_needs_linux_is_refused(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    devices, timeout, means = run.stdout.splitlines()[-3:]
    assert "devices is 2, but must be 1 here, because clients are trained in several processes on Linux only" in devices
    assert "timeout is 9.0, but must be left out here, because the system has no SIGALRM" in timeout
    expected = federation(tmp_path).fit(model(), data())
    assert means == str([evaluation.spread("global_test").mean for evaluation in expected.values()])
