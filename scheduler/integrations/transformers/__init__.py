"""Models of transformers with their routed experts in a store: shared trunk as it is, experts over three lanes.

``offload(model)`` takes a loaded model's experts over, ``attach(model, store)`` uses a store that exists, and ``load``
brings a checkpoint's experts straight to the store. ``Decoder`` makes text with the whole model as one CUDA graph.

Importing this imports torch and transformers. Nothing of theirs is patched: it is registered as an experts
implementation, which models choose by name.
"""

from trilane.integrations.transformers.versions import check_versions

check_versions()  # before what they lack is missed in the middle of an import

from trilane.integrations.transformers.decoder import Decoder  # noqa: E402
from trilane.integrations.transformers.handle import OffloadedModel, handle_of  # noqa: E402
from trilane.integrations.transformers.load_hook import TrilaneConfig, load  # noqa: E402
from trilane.integrations.transformers.offload import attach, offload  # noqa: E402

__all__ = ["Decoder", "OffloadedModel", "TrilaneConfig", "attach", "handle_of", "load", "offload"]
