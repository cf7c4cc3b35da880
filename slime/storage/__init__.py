"""Storage: ownership marks and durable files, SQLite files with group commit."""
