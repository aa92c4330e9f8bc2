package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tmc"
	tmcv1 "tmc/v1"
)

// live says ready, waits for a line, and has each worker prepare and submit its share of count messages, one after the other.
// It writes the keys of those that were submitted into the folder, and prints the monotonic times and its CPU time.
func live(how, address, key, name string, workers, count int, folder string) {
	client, call := connect(address, "orders", key)
	prepare, submit := overCalls(client)
	if how == "stream" {
		prepare, submit = overStream(dial(address, "orders", key, ""))
	}
	body := []byte(strings.Repeat("x", 256))
	fmt.Println("ready")
	_, err := bufio.NewReader(os.Stdin).ReadString('\n')
	fail(err)
	began, used := seconds(unix.CLOCK_MONOTONIC), seconds(unix.CLOCK_PROCESS_CPUTIME_ID)
	committed, all := make([]string, workers), sync.WaitGroup{}
	for worker := range workers {
		all.Go(func() {
			for turn := range count / workers {
				message := fmt.Sprintf("%s-%d-%d", name, worker, turn)
				deadline, stop := context.WithTimeout(call, time.Minute)
				id, err := prepare(deadline, &tmcv1.PrepareRequest{Topic: "bench.paid", Key: message, Body: body, AttemptId: attempt()})
				fail(err)
				fail(submit(deadline, &tmcv1.SubmitRequest{MessageId: id}))
				stop()
				committed[worker] += message + "\n"
			}
		})
	}
	all.Wait()
	fail(os.WriteFile(fmt.Sprintf("%s/%s.committed", folder, name), []byte(strings.Join(committed, "")), 0o600))
	fail(json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"began": began, "ended": seconds(unix.CLOCK_MONOTONIC), "cpu_s": seconds(unix.CLOCK_PROCESS_CPUTIME_ID) - used,
	}))
}

type preparing func(context.Context, *tmcv1.PrepareRequest) (string, error)
type submitting func(context.Context, *tmcv1.SubmitRequest) error

func overCalls(client tmcv1.MessageServiceClient) (preparing, submitting) {
	prepare := func(ctx context.Context, request *tmcv1.PrepareRequest) (string, error) {
		response, err := client.Prepare(ctx, request)
		return response.GetMessageId(), err
	}
	submit := func(ctx context.Context, request *tmcv1.SubmitRequest) error {
		_, err := client.Submit(ctx, request)
		return err
	}
	return prepare, submit
}

func overStream(client *tmc.Client) (preparing, submitting) {
	prepare := func(ctx context.Context, request *tmcv1.PrepareRequest) (string, error) {
		return client.Prepare(ctx, tmc.Message{Topic: request.Topic, Key: request.Key, Body: request.Body, Attempt: request.AttemptId})
	}
	submit := func(ctx context.Context, request *tmcv1.SubmitRequest) error {
		return client.Submit(ctx, request.MessageId)
	}
	return prepare, submit
}

func seconds(clock int32) float64 {
	var now unix.Timespec
	fail(unix.ClockGettime(clock, &now))
	return float64(now.Sec) + float64(now.Nsec)/1e9
}
