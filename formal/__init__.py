"""The model of the abort and drain protocol, and what checks it exhaustively (docs/protocol.md)."""
