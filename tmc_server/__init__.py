"""The transaction message center: server, duties, operators' tools."""
