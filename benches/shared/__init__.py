"""What several benches need: rows and reports, stores, engines, servers, other connectors."""
