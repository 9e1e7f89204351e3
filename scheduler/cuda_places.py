"""Where the control thread finds everything: addresses, streams and sizes of a CUDA device, by ``cuda_words.Place``."""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES, RECORD_NBYTES
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.host_lanes import team_task
from trilane.cuda_words import Place
from trilane.gpu_kernels.cuda_device import CudaDevice

BUFFERS = (
    Place.MAIL, Place.MAIL_GROUPS, Place.MAIL_MISSING, Place.MAIL_TOKENS, Place.STAMPS, Place.ACKNOWLEDGED,
    Place.PLAN_LIST, Place.UPDATES, Place.PENDING, Place.CPU_FLAG, Place.ABORT, Place.COPY_FLAGS, Place.COPIED,
    Place.FILL_FLAG, Place.MAIL_RECORDS, Place.MAIL_FLOATS, Place.BRIEF, Place.USES, Place.TOLD,
)  # fmt: skip


def make_places(device: CudaDevice, team: int, control: int) -> np.ndarray:
    """Places of a device, of a worker team, whose words are at ``team``, and of the words by Control."""
    places, pinned, driver = np.zeros(Place.SIZE, np.int64), device.pinned, device.driver
    assert pinned is not None
    for place in BUFFERS:
        places[place] = device.address[place.name.lower()]
    blocks = -(-device.shape.hidden // BLOCK)
    for place, value in (
        (Place.DRIVER, driver.table.ctypes.data), (Place.CONTEXT, driver.context),
        (Place.CONTROL, control), (Place.RESCUE, device.address["abort"] + 4),
        (Place.COPY_STREAM, device.copy_stream), (Place.FILL_STREAM, device.fill_stream),
        (Place.TEAM, team), (Place.TEAM_TASK, team_task().address),
        (Place.SLOTS, device.slots), (Place.SLOT_NBYTES, device.slot_nbytes),
        (Place.PINNED_END, pinned.end), (Place.INT8_STRIDE, blocks * RECORD_NBYTES),
        (Place.FLOATS_STRIDE, blocks * F32_BLOCK_NBYTES), (Place.PINNED_START, pinned.address),
        (Place.SEGMENT_NBYTES, pinned.segment_nbytes),
    ):  # fmt: skip
        places[place] = value
    return places
