"""The simulator: a trace of requests driven through the production Controller, in virtual time and without bytes."""
