"""An OpenAI-compatible endpoint over a model whose experts are in a store: the server of transformers, with our model.

Routes, handlers, streams and sampling are those of ``transformers serve``; it is put together here from its own parts,
around a model that is opened already. Importing this imports torch, transformers, fastapi, uvicorn and openai.
"""

from trilane.integrations.serving.app import build_app
from trilane.integrations.serving.served_model import served_name
from trilane.integrations.serving.server import open_socket, serve

__all__ = ["build_app", "open_socket", "serve", "served_name"]
