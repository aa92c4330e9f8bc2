"""SQL: tables, engines, group commit, catalog. The rest of the server reaches it through the ports of the domain."""
