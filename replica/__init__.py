"""The engine (scheduler, page pool, runner) and the Serve actor around it. Kept light: no torch here."""
