package tmc

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	tmcv1 "tmc/v1"
)

func TestOneMalformedItemIsRefusedAlone(t *testing.T) {
	call := func(items []*tmcv1.AckRequest) ([]string, error) {
		answers := []string{}
		for _, item := range items {
			if !utf8.ValidString(item.MessageId) {
				return nil, refused(status.Error(codes.Internal, "string field contains invalid UTF-8"))
			}
			answers = append(answers, item.MessageId)
		}
		return answers, nil
	}
	acks, all, failed := collect(t.Context(), call), sync.WaitGroup{}, make([]error, 100)
	for i := range failed {
		all.Go(func() {
			id := fmt.Sprint(i)
			if i == 50 {
				id = "\xff"
			}
			answer, err := acks.ask(t.Context(), &tmcv1.AckRequest{MessageId: id})
			if err == nil && answer != id {
				err = fmt.Errorf("%s was answered with %s", id, answer)
			}
			failed[i] = err
		})
	}
	all.Wait()
	for i, err := range failed {
		if (err != nil) != (i == 50) {
			t.Errorf("item %d: %v", i, err)
		}
	}
}

func TestAnAnswerForEachItemIsDemanded(t *testing.T) {
	acks := collect(t.Context(), func([]*tmcv1.AckRequest) ([]string, error) { return nil, nil })
	if _, err := acks.ask(t.Context(), &tmcv1.AckRequest{}); err == nil {
		t.Error("an item without an answer succeeded")
	}
}

func TestWhatNobodyWaitsForIsNotPerformed(t *testing.T) {
	began, ends, performed := make(chan struct{}), make(chan struct{}), []string{}
	call := func(items []*tmcv1.AckRequest) ([]string, error) {
		if items[0].MessageId == "first" {
			close(began)
			<-ends
		}
		for _, item := range items {
			performed = append(performed, item.MessageId)
		}
		return performed, nil
	}
	acks := collect(t.Context(), call)
	first := make(chan struct{})
	go func() { _, _ = acks.ask(t.Context(), &tmcv1.AckRequest{MessageId: "first"}); close(first) }()
	<-began
	ctx, cancel := context.WithCancel(t.Context())
	second := make(chan error)
	go func() { _, err := acks.ask(ctx, &tmcv1.AckRequest{MessageId: "second"}); second <- err }()
	cancel()
	if err := <-second; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	close(ends)
	<-first
	_, _ = acks.ask(t.Context(), &tmcv1.AckRequest{MessageId: "third"})
	if strings.Join(performed, " ") != "first third" {
		t.Errorf("performed: %v", performed)
	}
}

// described answers DescribeSubscriptions with a key.
type described struct {
	tmcv1.ConsumptionServiceClient
	key   []byte
	lock  sync.Mutex
	calls int
}

func (d *described) DescribeSubscriptions(
	context.Context, *tmcv1.DescribeSubscriptionsRequest, ...grpc.CallOption,
) (*tmcv1.DescribeSubscriptionsResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if d.calls++; d.calls == 1 {
		return nil, status.Error(codes.Unavailable, "it restarts")
	}
	return plan(d.key), nil
}

func plan(key []byte) *tmcv1.DescribeSubscriptionsResponse {
	return &tmcv1.DescribeSubscriptionsResponse{Subscriptions: []*tmcv1.SubscriptionInfo{
		{Topic: "order.paid", DeliveryKeys: []string{hex.EncodeToString(key)}},
	}}
}

func TestCopiesOfANewKeyWaitUntilItIsKnown(t *testing.T) {
	before, now := NewAttempt(), NewAttempt()
	center := &described{key: now}
	r := &receiver{client: &Client{log: slog.New(slog.DiscardHandler), consumed: center, ctx: t.Context()}, ctx: t.Context()}
	s := newScreen(r)
	s.reported = true // nothing is sent meanwhile
	s.learn(plan(before), time.Now())
	all, found := sync.WaitGroup{}, make([]judgment, 8)
	for i := range found {
		all.Go(func() {
			m := &Copy{MessageID: fmt.Sprintf("1-1-01-%d", i), Topic: "order.paid"}
			found[i] = s.judge(t.Context(), m, signedBy(now, m), "order.paid")
		})
	}
	all.Wait()
	for i, each := range found {
		if each != genuine {
			t.Errorf("copy %d: %d", i, each)
		}
	}
	if center.calls != 2 {
		t.Errorf("the center was asked %d times", center.calls)
	}
	m := &Copy{MessageID: "1-1-01-1", Topic: "order.paid", Body: []byte("changed")}
	if s.judge(t.Context(), m, signedBy(before, m), "order.paid") != forged {
		t.Error("a copy of another key passed")
	}
	if s.judge(t.Context(), &Copy{MessageID: "\xff", Topic: "other"}, "", "order.paid") != forged || s.forged["order.paid"].MessageId != "1-1-01-1" {
		t.Errorf("reports: %v", s.forged)
	}
}

func TestAKeyThatCannotBeReadLetsNothingPass(t *testing.T) {
	s := newScreen(&receiver{})
	s.learn(&tmcv1.DescribeSubscriptionsResponse{Subscriptions: []*tmcv1.SubscriptionInfo{{Topic: "t", DeliveryKeys: []string{"zz"}}}}, time.Now())
	m := &Copy{MessageID: "1-1-01-1", Topic: "t"}
	for _, signature := range []string{"", signedBy(nil, m)} {
		if right, _ := s.isGenuine(m, signature); right {
			t.Errorf("%q passed", signature)
		}
	}
}

func TestACancelledConsumerIsNoSilence(t *testing.T) {
	if err := whyEnded(make(chan *amqp.Error)); err == nil {
		t.Error("it has no reason")
	}
}

func TestErrorsCanBeSent(t *testing.T) {
	text := shortened("\xff" + strings.Repeat("ü", 1000))
	if !utf8.ValidString(text) || utf8.RuneCountInString(text) != 500 {
		t.Errorf("%d characters: %q", utf8.RuneCountInString(text), text)
	}
	late := (*later)(nil)
	if errors.As(Later(1000*time.Hour), &late); late.after != 24*time.Hour {
		t.Errorf("later: %s", late.after)
	}
}

func TestTheTransactionIsEndedByTransact(t *testing.T) {
	tx := &Tx{}
	if tx.Commit() == nil || tx.Rollback() == nil {
		t.Error("a handler can end it")
	}
}

func TestTwoMessagesOfOneTransactionHaveTwoKeys(t *testing.T) {
	tx := &Tx{}
	tx.Send(Message{Topic: "order.paid", Key: "1"})
	tx.Send(Message{Topic: "order.sent", Key: "1"})
	if messages, err := tx.collected(); err != nil || len(messages) != 2 {
		t.Errorf("%d messages: %v", len(messages), err)
	}
	tx = &Tx{}
	tx.Send(Message{Topic: "order.paid", Key: "1"})
	tx.Send(Message{Topic: "order.paid", Key: "1"})
	if _, err := tx.collected(); err == nil {
		t.Error("two messages with one key were taken")
	}
}

func TestAMessageThatComesTooLateIsNotLostInSilence(t *testing.T) {
	tx := &Tx{}
	if _, err := tx.collected(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("it was taken")
		}
	}()
	tx.Send(Message{Topic: "order.paid", Key: "1"})
}

func TestAConsumerThatLacksSomethingIsRefused(t *testing.T) {
	nothing := func(context.Context, *Copy) error { return nil }
	for _, lacking := range []Consumer{
		{}, {Handlers: map[string]Handler{"": nothing}}, {Handlers: map[string]Handler{"t": nil}},
		{Handlers: map[string]Handler{"t": nothing}, Workers: -1},
	} {
		if lacking.check() == nil {
			t.Errorf("%v was taken", lacking)
		}
	}
}

// reading is an error whose text is that of another one, which may be missing.
type reading struct{ other error }

func (r *reading) Error() string { return r.other.Error() }

func TestAnErrorThatPanicsIsAFailureOfItsHandler(t *testing.T) {
	r := &receiver{client: &Client{log: slog.New(slog.DiscardHandler)}}
	for _, thrown := range []error{(*reading)(nil), Reject(nil)} {
		err := r.recovering(t.Context(), func(context.Context, *Copy) error { return thrown }, &Copy{})
		if err == nil || err.Error() == "" {
			t.Errorf("%T became %v", thrown, err)
		}
	}
}

func TestAClosedClientRunsNothing(t *testing.T) {
	client, err := Dial(Config{Addresses: []string{"127.0.0.1:1"}, App: "orders"})
	if err != nil {
		t.Fatal(err)
	}
	all := sync.WaitGroup{}
	for range 16 {
		all.Go(func() {
			for client.background(func() { time.Sleep(time.Microsecond) }) {
			}
		})
	}
	if client.Close() != nil || client.Close() != nil {
		t.Error("it could not be closed twice")
	}
	all.Wait()
	if _, err := client.Publish(t.Context(), Message{}); !errors.Is(err, ErrClosed) {
		t.Errorf("published: %v", err)
	}
}
