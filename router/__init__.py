"""HTTP API, text work, page hashes, directory, placement and the wire protocol. Imports no torch."""
