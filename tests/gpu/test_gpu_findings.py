"""What ``p2pkv doctor`` says of devices: never silently, so the way their pages go is named."""

from __future__ import annotations

from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.transports import examine_transports
from p2pkv.config import Config


def _gpu(**settings: object) -> Finding:
    config = Config.load({"device_staging_size": "32MiB", **settings}, environ={})
    return next(finding for finding in examine_transports(config) if finding.what == "GPU")


def test_the_driver_its_devices_and_the_staging_are_named(
    cuda_settings: dict[str, object], kind: str
) -> None:
    finding = _gpu(**cuda_settings)
    assert finding.verdict is Verdict.GOOD, finding
    assert finding.says.startswith("CUDA 12.8 (0: emulated device 0" if kind == "emulated" else "CUDA ")
    assert "pages in device memory go through 32 MiB of page-locked host memory" in finding.says
