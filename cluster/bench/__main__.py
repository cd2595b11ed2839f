"""``python -m cluster.bench``: what ``everwarm bench`` runs, where Ray is not installed."""

from cluster.bench import app

app()
