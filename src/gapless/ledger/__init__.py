"""Where every token's time went: recorded while steps run, booked to accounts behind them, to the nanosecond."""
