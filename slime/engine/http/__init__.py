"""Client side of SGLang's HTTP dialect: request and response types, errors, engine client, pool and router."""
