"""What every test starts from."""

from __future__ import annotations

import faulthandler
import os

import pytest


@pytest.mark.process
@pytest.mark.smoke
def test_only_the_process_of_the_tests_prints_where_it_dies(pytestconfig: pytest.Config) -> None:
    assert faulthandler.is_enabled() is pytestconfig.pluginmanager.has_plugin("faulthandler")
    child = os.fork()
    if child == 0:
        os._exit(faulthandler.is_enabled())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
