"""What a GPU's profile is valid for: this machine, and its GPU, driver and link."""

from __future__ import annotations

from dataclasses import replace

from trilane.calibrate import this_machine
from trilane.gpu_kernels.driver import Driver
from trilane.gpu_kernels.gpu_link import read_link
from trilane.profile import Machine


def cuda_machine(driver: Driver) -> Machine:
    """This machine with the driver's GPU; what is not known of the link is None."""
    link = read_link(driver.pci_address())
    return replace(
        this_machine(),
        gpu=driver.name(),
        driver=link.driver,
        link_width=link.width,
        link_max_generation=link.max_generation,
    )
