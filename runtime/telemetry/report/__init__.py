"""`sluice report`: a run's folder as one HTML file. Reading, arithmetic and drawing are apart; only `page` loads plotly."""
