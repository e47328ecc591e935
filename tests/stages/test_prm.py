from stages.prm import calibration_curves


def test_calibration_by_place_has_the_places_in_their_order():
    places = ("1", "2", "9+")
    metrics = {
        f"eval/step {what}/{place}": n / 10
        for what in ("label", "probability", "accuracy")
        for n, place in enumerate(places)
    }
    metrics |= {"eval/step labelled otherwise": 1.0, "step label/1": 9.0}
    curves = calibration_curves(dict(reversed(metrics.items())))
    assert curves == dict.fromkeys(("labelled right", "predicted right", "accuracy"), ([1, 2, 9], [0.0, 0.1, 0.2]))
