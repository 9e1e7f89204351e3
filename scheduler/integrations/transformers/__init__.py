"""Models of transformers with their routed experts in a store: shared trunk as it is, experts over three lanes.

``offload(model)`` takes a loaded model's experts over, ``attach(model, store)`` uses a store that exists, and ``load``
brings a checkpoint's experts straight to the store. Importing this imports torch and transformers; nothing of theirs is
patched: it is registered as an experts implementation, which models choose by name.
"""

from trilane.integrations.transformers.decoder import Decoder
from trilane.integrations.transformers.handle import OffloadedModel, handle_of
from trilane.integrations.transformers.load_hook import TrilaneConfig, load
from trilane.integrations.transformers.offload import attach, offload

__all__ = ["Decoder", "OffloadedModel", "TrilaneConfig", "attach", "handle_of", "load", "offload"]
