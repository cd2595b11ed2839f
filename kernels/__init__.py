"""Fused kernels, their torch references and the dispatch between them.

Imports nothing and carries no version attribute: transformers probes a distribution of this name on import.
"""
