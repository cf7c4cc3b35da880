"""Storage: marked and durable files, SQLite tables, group commits."""
