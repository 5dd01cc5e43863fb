"""Routing: which experts a token goes to and by which weights, what keeps their loads even, and what is told of it.

    rule, balance = RouterRule(64, 6, score="sigmoid"), Balance(aux_loss_coeff=1e-4, bias_update_rate=1e-3)
    router = Router(hidden_size, rule, balance)
    weights, indices, *_ = router(x)            # the losses come with the weights' gradient
    ...
    optimizer.step()
    update_expert_biases(model, mesh["dp"])     # once a step
    if step % 10 == 0:                          # waits for the device
        told = read_statistics(model, mesh["dp"])
        disttrain.report(step=step, loss=loss, **expert_numbers(told))
        tracking.write(step, router_numbers(told))

`watch_routers(model)` does the same for the routers of a model of transformers.
"""
