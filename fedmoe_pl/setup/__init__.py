"""From settings to a run: data and models are set up, checked, and a run is made or resumed."""
