"""An OpenAI-compatible endpoint over a model whose experts are in a store: the server of transformers, with our model.

Routes, handlers, streams and sampling are those of ``transformers serve``; it is put together here from its own parts,
around a model that is opened already. Importing this imports torch, transformers, fastapi, uvicorn and openai.
"""

import transformers

try:
    import transformers.cli.serving.server  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"trilane.integrations.serving is built on the server of transformers 5.17, which {transformers.__version__} "
        f"does not have in that place ({error}); pip install 'transformers==5.17.*'",
        name=error.name,
    ) from error

from trilane.integrations.serving.app import build_app  # noqa: E402
from trilane.integrations.serving.served_model import served_name  # noqa: E402
from trilane.integrations.serving.server import open_socket, serve  # noqa: E402

__all__ = ["build_app", "open_socket", "serve", "served_name"]
