"""Messages and services of the package `tokentape.v1`, generated from `proto/tokentape/v1` by `make proto`."""
