"""Pydantic models of every request and answer. The OpenAPI document and the field reference are generated from them."""
