"""The engine on a thread of this process."""

from __future__ import annotations

import pytest

from ec_s3.port import ThreadPort
from ec_s3.testing.port_conformance import NAMESPACE, OpenPort, PortTests
from ec_s3.testing.weight_conformance import WeightTests


class TestThreadPort(PortTests, WeightTests):
    @pytest.fixture(scope="class")
    @classmethod
    def open_port(cls) -> OpenPort:
        return lambda config, slab: ThreadPort(config, NAMESPACE, slab)
