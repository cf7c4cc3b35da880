"""SGLang's HTTP dialect from the client's side: requests, answers, errors, one engine, several behind one door."""
